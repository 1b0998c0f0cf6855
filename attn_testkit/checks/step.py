from .memory import *
from .numeric import *
from .outputs import mode_outputs


def judge_step(observed, expected, schedule, claims):
    same_bits = claims.deterministic and claims.batch_invariant
    found = writes_own_kv(observed, schedule.case)
    numeric = [
        *output_written(observed, expected),
        *finite(observed, expected),
        *matches_oracle(observed, expected),
    ]
    found += numeric
    if not numeric:
        found += graph_matches_eager(observed, expected, same_bits)
        found += mode_outputs(observed, expected, schedule.case)
    found += inputs_unchanged(observed)
    found += addresses_stable(observed)
    return found
