"""Options of layers (windows, caps, sinks) together with things that are mostly tried by themselves: outputs that the
caller gives, pools of many elements; each with other heads, head dims and numbers too. And a context that is full.

A path that is chosen by the layer has its own addresses and its own stores (vLLM #33759, vllm-ascend #6558).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ..cases.case import CODES, Case
from ..cases.co_residents import with_other_heads
from ..cases.layers import Layers
from ..cases.plans import context_len
from ..cases.server_variants import SERVER_VARIANTS, usual_page, variant_of
from ..contract import ROW_FORMATS, Capabilities
from .layer_options import with_options, without_options

_WINDOW = 7
"""Shorter than most of the requests."""
_LONG, _LONG_OF_MLA = 66_000, 8_192
"""Keys that a case of each mode has where as many are declared; those of MLA have 576 numbers."""
_SHORT = 300
"""Tokens of context that all cases have anyway."""
_DRAWS = 40
_PAGES_BELOW = 6
"""Pages below the full context: a draft has a region of pages for each branch next to its prefix."""


def options_together_cases(declared: Capabilities, small: Case, arrays: Sequence[Case]) -> Iterator[Case]:
    """Made of ``small``, a case with little work for each row and key, which has one KV head where that is declared.

    Combinations that a case of ``arrays`` has with several KV heads get no case here.
    """
    there = {_together(case) for case in arrays if case.heads.kv_heads > 1}
    small = small.with_changes(page_size=usual_page(declared), data="gauss")
    for variant in (variant for variant in SERVER_VARIANTS.values() if variant.combines and variant.reaches_kernels):
        for alone in variant.cases(declared, small):
            twin = with_other_heads(declared, alone)
            optional = _with_options(declared, twin)
            if _together(optional) not in there:
                yield optional
            branching = without_options(declared, twin)
            if branching != twin:
                yield branching
    narrow = sorted(declared.kv_dtypes - {small.kv_dtype})
    inside = [each for each in narrow if each not in ROW_FORMATS or not ROW_FORMATS[each].apart]
    for word, dtypes in (("given_out", narrow), ("bigpool", inside)):
        yield from (
            with_other_heads(declared, alone).with_changes(kv_dtype=dtypes[0])
            for alone in (SERVER_VARIANTS[word].cases(declared, small) if dtypes else ())
        )
    yield from _full_context(declared, small)


def _together(case: Case) -> tuple[frozenset[str], bool, bool, bool, bool]:
    return case.variants, case.window >= 0, case.logit_cap > 0, case.sinks, case.topk > 1


def _with_options(declared: Capabilities, minimal: Case) -> Case:
    """``minimal`` with all declared options of a layer, in some of two layers; without a window if nothing is
    causal."""
    optional = with_options(declared, minimal.with_changes(layers=Layers()), _WINDOW)
    return optional.with_changes(window=-1) if not variant_of(minimal).causal else optional


def _full_context(declared: Capabilities, small: Case) -> Iterator[Case]:
    """A request of as many tokens as is declared, where no other case comes near, and one of five eighths, whose keys
    are not a multiple of a power of two: masks and tables of a fixed size end or wrap there (vllm-ascend #6803).
    """
    most = declared.max_context_len
    if most <= _SHORT or (most > _LONG_OF_MLA if small.heads.layout.wide_rows else most > _LONG):
        return
    two = small.of_requests((1, 1), layers=Layers(1))
    # Whether the request table is wider than its longest request is drawn for each case: the longest that fits.
    for below, shift in product(range(1, _PAGES_BELOW * small.page_size), range(_DRAWS)):
        near = two.with_changes(prefixes=(most - below, most * 5 // 8 + shift), layout="shuffled", data=CODES)
        if context_len(near) <= most:
            yield near
            return
