"""Case-runs from plan to result: the loop over case-runs, the worker's side and the judge's side."""
