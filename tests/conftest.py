"""Helpers that tests of several folders share lie here, beside this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
