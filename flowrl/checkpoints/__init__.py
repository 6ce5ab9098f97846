"""Checkpoints on disk: which are complete, what they hold, and whether a run may go on from one. No process needed."""
