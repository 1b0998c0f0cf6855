"""The programs are held to the rules of the emulation: helpers lie beside its tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "cuda_on_cpu" / "tests"))
