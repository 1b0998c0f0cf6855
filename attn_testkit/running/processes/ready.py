"""The last import of the process that workers are forked from: it prepares once what every worker needs first. It also
hides these objects, and everything that was imported, from the garbage collector. A worker that collects garbage would
look at every object of torch and of the kit, and so copy the pages that it shares: two thirds of its start.
"""

import atexit
import gc

import numpy as np

from ...cases.case import parse_case
from ...cases.normals import BANK_SIZE, normals

# The expressions that read case ids are compiled, and both banks of random numbers are drawn.
parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.9-n3a1.3-shuffled-gauss-b2prod-s3")
normals((BANK_SIZE + 1,), np.random.default_rng(0))

gc.freeze()
# At the very end they may go: extension modules print what of theirs is still alive then.
atexit.register(gc.unfreeze)
