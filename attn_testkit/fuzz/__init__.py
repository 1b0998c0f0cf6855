"""Random cases over everything that a backend claims, and what fails made small. Needs the extra ``fuzz``."""
