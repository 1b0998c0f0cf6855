"""The parts of ``ci/mutants.py``: small changes to source text, the processes that judge them, and what is kept."""
