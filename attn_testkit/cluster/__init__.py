"""Case-runs as tasks of a Ray cluster: Ray schedules, retries and finds out which nodes died."""
