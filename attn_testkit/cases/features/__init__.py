"""Features of cases, one file and one object each: ``table.py`` lists them, and everything else is a loop over it."""
