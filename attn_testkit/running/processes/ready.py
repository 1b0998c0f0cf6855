"""The last import of the process that workers are forked from: it prepares once what every worker needs first. It also
hides these objects, and everything that was imported, from the garbage collector. A worker that collects garbage would
look at every object of torch and of the kit, and so copy the pages that it shares: two thirds of its start.
"""

import atexit
import gc
import sys
import traceback
from multiprocessing import spawn
from types import TracebackType

import numpy as np

from ...cases.case import parse_case
from ...cases.normals import BANK_SIZE, normals


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nothing catches, except that a lane asked for a worker and ended before it said what the
    worker runs: that happens after ``-x``."""
    frames = traceback.extract_tb(trace)
    if not (kind is EOFError and frames and (frames[-1].filename, frames[-1].name) == (spawn.__file__, "_main")):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say

# The expressions that read case ids are compiled, and both banks of random numbers are drawn.
parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.9-n3a1.3-shuffled-gauss-b2prod-s3")
normals((BANK_SIZE + 1,), np.random.default_rng(0))

gc.freeze()
# At the very end they may go: extension modules print what of theirs is still alive then.
atexit.register(gc.unfreeze)
