"""Results of a run: findings, case-runs, the run, and their texts. Nothing here imports torch."""
