"""Random cases over everything that a backend declares; failing cases are minimized. Needs the extra ``fuzz``."""
