"""Planning and running case-runs, for every front end: no pytest, no printing."""
