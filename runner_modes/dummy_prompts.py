"""Capture of the graphs around attention: for an extend, SGLang runs attention as well, on a prompt of no request.

SGLang's runners of prefill graphs, the piecewise and the breakable one, plan one dummy prompt without a prefix for each
number of rows, and run the model on it: twice as a warm-up, and once while attention interrupts the capture and comes
back to it (``eager_on_graph``). A backend may keep parts of that plan and use them for live prompts (sglang #31198).
"""

from __future__ import annotations

from functools import partial

from attn_testkit.cases.case import Case
from attn_testkit.contract import ForwardMode
from attn_testkit.environment import side_stream
from attn_testkit.graphs.capture import warm_up
from attn_testkit.steps.schedule import Schedule

from .batches import captured_batch
from .errors import blame
from .extend import EXTEND
from .forward import forward, pieces_for, pieces_key
from .harness import ServerHarness
from .pieces import Pieces
from .static_inputs import make_static_inputs
from .step_tensors import STEP_TENSORS

_RUNS = 3
"""Two warm-ups, and the capture."""
_FILL = 1
"""``seq_lens`` of padded requests in buffers of which only a dummy prompt is used."""


def capture_pieces(harness: ServerHarness, schedule: Schedule) -> None:
    """Capture the graphs around attention that the steps of ``schedule`` need, the largest first, as servers do before
    their first request. Raises ``RunError`` for whatever the backend raises.
    """
    case = schedule.case
    if "piecewise" not in case.variants:
        return
    missing = {
        key: step for step in schedule.every_step if (key := pieces_key(harness, case, step)) not in harness.pieces
    }
    if missing and _runs_attention(case):
        harness.prepare_capture()
    for key in sorted(missing, reverse=True):
        pieces = pieces_for(harness, case, missing[key])
        if pieces and _runs_attention(case):
            _run_on_dummy(harness, schedule, pieces, rows=key[0])


def _runs_attention(case: Case) -> bool:
    """False for vLLM's server, whose captures of these graphs leave attention out."""
    return case.mode is ForwardMode.EXTEND and "given_out" not in case.variants


def _run_on_dummy(harness: ServerHarness, schedule: Schedule, pieces: Pieces, rows: int) -> None:
    """Plan and run one prompt of ``rows`` rows, or as many as a prompt may have. Its memory is page 0."""
    width = min(rows, harness.context.max_extend_tokens)
    static = make_static_inputs(harness, schedule, _FILL, STEP_TENSORS)
    extends = EXTEND.captured_extends(harness, static, 1, width, _FILL)
    batch = captured_batch(harness, static, EXTEND.mode, 1, width, None, extends)
    label = f"dummy prompt of {width} rows"
    with blame("plan for capture", label):
        harness.backend.init_forward_metadata(batch)
    with blame("warm-up", label):
        warm_up(partial(forward, harness, EXTEND, batch, schedule.case, pieces=pieces), side_stream(), _RUNS)
