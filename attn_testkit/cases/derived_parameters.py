"""Derived parameters of a case, which its id does not show: one table, each a hash of (id, name of the parameter).

Hashes of different names are independent, so over many cases every value of one choice occurs with every value of
another; ``tests/cases/test_derived_parameters.py`` counts this. ``attn-testkit explain CASE`` shows what a case chose.
A choice has a condition, and may be read only if it applies: so ``explain`` shows what runs.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..contract import ROW_FORMATS, Execution, ForwardMode
from ..contract.kv_layouts import OWN
from .features.data_pattern import DATA
from .features.row_ranks import ranks_have_no_order
from .fields import Fields
from .layers import TURNS


@dataclass(frozen=True)
class Value:
    """One value of a choice, in words, and its weight among the others."""

    words: str
    weight: int = 1


@dataclass(frozen=True)
class DerivedParameter:
    """One thing that a case decides by a hash of its id."""

    name: str
    about: str
    """The parameter in plain words."""
    values: tuple[Value, ...]
    """Values in the order of the numbers that ``derived`` returns. Empty: the caller passes the number of values."""
    applies: Callable[[Fields], bool] = lambda case: True
    execution: Execution | None = None
    """The only execution that the parameter changes; None: both."""

    @property
    def total(self) -> int:
        """Sum of the weights."""
        return sum(value.weight for value in self.values)


def shallow_depth(case: Fields) -> int:
    """S of the shallowest draft tree that allows the case's accepted counts. Draft-extend only."""
    return min(case.width - 1, max(1, max(case.new) - 1))


def _one_layer_has_it(case: Fields) -> bool:
    return case.window >= 0 and case.layer_windows != "same" and not case.layers.varied and case.layers.count > 1


def _others_may_have_one(case: Fields) -> bool:
    return case.window >= 0 and case.layer_windows == "any" and not case.layers.varied and case.layers.count > 1


def address_varies(case: Fields) -> bool:
    """True if the kit decides where the pool of a case is: no backend lays it out, and it has an ordinary size."""
    has_large_pool = "bigpool" in case.variants or (case.state is not None and case.state.big)
    return case.kv_layout != OWN and not has_large_pool


def scales_are_computed(case: Fields) -> bool:
    """True if rows of the pool hold scales that are computed from the numbers of a tile."""
    form = ROW_FORMATS.get(case.kv_dtype)
    return form is not None and any(plane.is_scales for plane in form.planes)


_QUARTERS = ("first", "second", "third", "last")
_LAYERS_IN_WORDS = tuple(Value(f"layer {place}, and every fourth one after it") for place in range(TURNS))
CONTIGUOUS = 1
"""The value of ``qkv-memory`` for which q, k and v are three separate tensors."""

DERIVED_PARAMETERS: tuple[DerivedParameter, ...] = (
    DerivedParameter(
        "grad-mode", "how gradients are disabled", (Value("torch.no_grad"), Value("torch.inference_mode"))
    ),
    DerivedParameter(
        "qkv-memory",
        "memory layout of q, k and v",
        (Value("strided views of one packed tensor"), Value("contiguous tensors")),
    ),
    # If MLA is attended as MHA, a prompt's k or v is a part of what one projection gives for each head (kv_b_proj).
    DerivedParameter(
        "kv-memory",
        "memory layout of k and v of new tokens",
        (Value("as q does"), Value("side by side in each head, if takes_strided_heads is declared; otherwise like q")),
        lambda case: case.mode is ForwardMode.EXTEND and not case.heads.layout.values_in_keys,
    ),
    # Rows of a tile that no request has count 0 times what lies there (vllm-ascend #10276). In the other half of the
    # cases memory ends with the last row, so that the emulation reports what is read after it. Layers without a state
    # have the server variant ``piecewise``.
    DerivedParameter(
        "rows-behind",
        "memory after the last row of q, k and v",
        (Value("none: the memory ends with the last row"), Value("rows of NaN, as in a server's longer buffer")),
        lambda case: case.state is not None,
    ),
    DerivedParameter(
        "windowed-layer",
        "the first layer with the case's window; every second layer from there on has it",
        (Value("layer 0"), Value("layer 1")),
        _one_layer_has_it,
    ),
    DerivedParameter(
        "other-window",
        "the window of the other layers",
        (Value("none", 3), Value("a wider one: 2 W + 3")),
        _others_may_have_one,
    ),
    DerivedParameter(
        "capped-layer",
        "the first layer with the soft cap; every second layer from there on has it",
        (Value("layer 0"), Value("layer 1")),
        lambda case: case.logit_cap > 0 and not case.layers.varied and case.layers.count > 1,
    ),
    DerivedParameter(
        "narrowest-layer",
        "the first layer with the case's window; later layers have none, then wider windows",
        _LAYERS_IN_WORDS,
        lambda case: case.layers.varied and case.window >= 0,
    ),
    DerivedParameter(
        "richest-layer",
        "the first layer with soft cap and sinks; the next layers have only the cap, neither, and only sinks",
        _LAYERS_IN_WORDS,
        lambda case: case.layers.varied and (case.logit_cap > 0 or case.sinks),
    ),
    # If a request fills the context, the context need not be whole pages.
    DerivedParameter(
        "context-room",
        "max_context_len compared with the longest request",
        (Value("longer by at least a page, in whole pages", 3), Value("equal: the longest request fills it")),
    ),
    DerivedParameter(
        "shared-prefixes",
        "position at which shared prefixes diverge",
        (Value("as late as the second longest prefix allows"), Value("before the shortest prefix ends")),
        lambda case: case.layout == "shared",
    ),
    # Each replay but the first two has another; see ``steps/variety.py``.
    DerivedParameter(
        "layout-turns",
        "layouts of the steps from step 2 on, in turn",
        (Value("in order, beginning with the case's"), Value("backwards")),
        lambda case: case.layout != "shared",
    ),
    DerivedParameter(
        "padding-turns",
        "padding of the replays from step 2 on, all in turn",
        (Value("in order, beginning with the case's"), Value("backwards")),
        lambda case: case.padding != "small",
        Execution.GRAPH,
    ),
    DerivedParameter(
        "data-turns",
        "data of the steps from step 2 on: the case's, gauss, shifted and one_hot in turn",
        (Value("in order, beginning with the case's"), Value("backwards")),
        lambda case: case.data in DATA,
    ),
    # Draft-extend v2 has a row for every node of the target's tree, and a branching tree has more nodes than S + 1: a
    # stride of S + 1 is right only for chains (sglang #27545).
    DerivedParameter(
        "draft-depth",
        "S of the draft tree whose nodes are the rows",
        (Value("rows - 1, for a chain"), Value("as shallow as the accepted counts allow")),
        lambda case: case.mode is ForwardMode.DRAFT_EXTEND_V2 and shallow_depth(case) < case.width - 1,
    ),
    DerivedParameter(
        "draft-topk",
        "top-k of the draft model's output",
        (Value("1, the argmax"), Value("3")),
        lambda case: case.mode is ForwardMode.DRAFT_EXTEND,
    ),
    # A small pool of a test lies across such a place by chance only; that of a server always does.
    DerivedParameter(
        "pool-address",
        "address of the pool",
        (
            Value("anywhere", 8),
            *(Value(f"a multiple of 4 GiB is in the {each} quarter of the pool") for each in _QUARTERS),
        ),
        address_varies,
    ),
    # Heads per rank follow from the ranks of attention, of which a server may have fewer than of other layers (sglang
    # #12961, #25031). A hand-over names its own ranks.
    DerivedParameter(
        "server-ranks",
        "ranks of the server, and those among which attention heads are dealt",
        (Value("1 rank", 2), Value("8 ranks, each with all heads"), Value("8 ranks, of which 2 share the heads")),
        lambda case: not case.handed,
    ),
    # Ranks of a server run at the same time: none may depend on what another one has left somewhere.
    DerivedParameter(
        "rank-order",
        "order in which ranks with pools of their own run",
        (Value("from rank 0 on"), Value("from the last rank on")),
        ranks_have_no_order,
    ),
    DerivedParameter(
        "receiving-rank",
        "tensor-parallel rank that receives the memory of requests",
        (),
        lambda case: bool(case.handed),
    ),
    # The scale of such a tile is 0 if it is computed like the others, and zeros are divided by it (aiter #4195).
    DerivedParameter(
        "tiles-of-zeros",
        "zeros among keys and values, in steps with gauss data",
        (Value("none"), Value("some rows, all except one tile of other rows, and some tiles", 3)),
        scales_are_computed,
    ),
    # A scheduler has a number of tokens for a step: one prompt fills them while others decode, or several share them.
    DerivedParameter(
        "chunked-requests",
        "requests whose prompt continues after the first chunk",
        (Value("only the request of the longest chunk; the others decode"), Value("everyone's")),
        lambda case: case.chunks > 1,
    ),
    DerivedParameter(
        "last-chunk",
        "new tokens of the last chunk",
        (
            Value("1, which looks like a decode"),
            Value("half of the chunk before"),
            Value("as many as in the chunk before"),
        ),
        lambda case: case.chunks > 1,
    ),
    # Servers have captured with the field unset, and baked a stride of -1 into a graph (sglang #31367). For backends
    # that say that they take that; others get the width.
    DerivedParameter(
        "num-tokens-per-req",
        "spec_info.num_tokens_per_req at capture",
        (Value("0"), Value("-1, as servers leave it unset")),
        lambda case: case.mode.is_speculative() or case.multi_mode or case.rounds > 0,
        Execution.GRAPH,
    ),
    # Buffers that grow on demand still grow under the graphs.
    DerivedParameter(
        "eager-before-graphs",
        "an eager step on the instance before it captures",
        (Value("none"), Value("the step with the fewest rows")),
        execution=Execution.GRAPH,
    ),
    # State that a backend keeps by the lengths is right for all steps but the first of these. The others label steps.
    DerivedParameter(
        "second-step",
        "the second step on the same instance",
        (
            Value("lengths of the first step, other requests", 9),
            Value("longer, exact", 2),
            Value("one short request", 2),
            Value("other bucket", 2),
            Value("own batch, elsewhere", 2),
            Value("same lengths, other requests", 2),
            Value("lengths in another order", 2),
            Value("long and short", 2),
            Value("other bucket, padded", 2),
            Value("more requests than any graph", 2),
        ),
        lambda case: not case.encoder_len,
        execution=Execution.EAGER,
    ),
    DerivedParameter(
        "second-step-stored",
        "save_kv_cache of the second step",
        (Value("True"), Value("False: the pool holds the new keys and values, and k and v are NaN")),
        lambda case: case.state is None and not case.encoder_len,
        execution=Execution.EAGER,
    ),
    # State that is kept by shapes has the strides of the call that it was made for (flashinfer #4270).
    DerivedParameter(
        "second-step-memory",
        "memory layout of q, k and v in the second step",
        (
            Value("as in the first step"),
            Value("the opposite of the first: contiguous instead of views, or views instead of contiguous"),
        ),
        execution=Execution.EAGER,
    ),
    # The second longest is long enough to be split, and does not set the batch's maximum length.
    DerivedParameter(
        "isolated-request",
        "the request that runs again by itself, if batch invariance is declared",
        (Value("the second longest", 5), Value("the shortest"), Value("the first"), Value("the last")),
        lambda case: case.bs > 1 or (case.padding == "small" and case.bucket > 1),
        Execution.EAGER,
    ),
    DerivedParameter(
        "undeclared",
        "which undeclared value the constructor must refuse",
        (),
        execution=Execution.EAGER,
    ),
)
_BY_NAME = {parameter.name: parameter for parameter in DERIVED_PARAMETERS}


@lru_cache(maxsize=1 << 14)
def _hashed(case_id: str, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{case_id}\n{name}".encode(), digest_size=8).digest(), "little")


def derived(case: Fields, name: str, n: int | None = None) -> int:
    """See ``Case.derived``."""
    parameter = _BY_NAME.get(name)
    if parameter is None:
        close = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no choice {name!r}{hint}; there are: {', '.join(_BY_NAME)}")
    if not parameter.applies(case):
        raise ValueError(f"choice {name!r} does not apply to {case.id}")
    number = _hashed(case.id, name)
    if not parameter.values:
        if n is None or n < 1:
            raise ValueError(f"choice {name!r} needs the number of its values, at least 1; it was read with n = {n}")
        return number % n
    if n not in (None, len(parameter.values)):
        raise ValueError(f"choice {name!r} has {len(parameter.values)} values, but was read with n = {n}")
    number %= parameter.total
    for index, value in enumerate(parameter.values):
        number -= value.weight
        if number < 0:
            return index
    raise AssertionError("weights are positive")


def chosen(case: Fields) -> Iterator[tuple[DerivedParameter, Value | None]]:
    """Every choice that applies to a case, and its value; None where the values are not known without a backend."""
    for parameter in DERIVED_PARAMETERS:
        if parameter.applies(case):
            yield parameter, parameter.values[derived(case, parameter.name)] if parameter.values else None
