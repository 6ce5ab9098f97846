"""What `python -m flowrl.doctor` looks at before a long run: `node` measures, `judgement` decides."""
