"""What happens to a run when a part of it ends at a given moment: `python -m recipes.kill_matrix`."""
