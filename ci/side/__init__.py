"""The parts of ``ci/side_by_side.py``: what each of the two kits runs, and the table of both."""
