"""Case-runs from plan to result: the loop over them, the worker's side, the judge's side."""
