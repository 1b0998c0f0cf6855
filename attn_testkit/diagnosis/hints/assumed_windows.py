"""Windows of causal layers, if the KV tokens that a row attended to could not be found out: attention is computed again
with another window, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ...cases.features.server.table import variant_of
from ...contract import AttentionLayer
from ...families.softmax.attention import seen_in
from ...steps.data import StepData, bytes_if_fp8, make_layers
from .evidence import LONGEST, Evidence, Supposed
from .hint import Level, assumption, hint
from .values import with_a_window_alone


def _windows_unexamined(e: Evidence) -> bool:
    """True if causal layers have windows, and no probe named the KV tokens of a wrong row, as with ALiBi."""
    case, comparison = e.schedule.case, e.comparison
    wrong = comparison.all_finite and not comparison.right and comparison.worst is not None
    windows = any(layer.sliding_window_size >= 0 for layer in make_layers(case))
    known = case.head_maps or e.attended is not None or e.misrouted
    return wrong and windows and not known and variant_of(case).causal and max(e.lens, default=0) <= LONGEST


@assumption(_windows_unexamined, silences=("length_threshold",))
def other_windows_of_causal_layers(e: Evidence) -> Iterator[Supposed]:
    """Suppose no window, one of another size, one of whole pages, or a ring that later rows of the step overwrite."""
    fitting = [each for each in _mistakes(e) if e.right_for(each)]
    if len(fitting) > 1:
        # This step does not distinguish them.
        causes = "; or ".join(each.text.partition(": the result")[0] for each in fitting)
        fitting = [replace(fitting[0], text=f"one of these mistakes, which give the same numbers here: {causes}")]
    yield from fitting


def _mistakes(e: Evidence) -> Iterator[Supposed]:
    data, layers, page = e.expected.data, make_layers(e.schedule.case), e.schedule.case.page_size

    def with_windows(text: str, size: Callable[[int], int]) -> Supposed:
        return Supposed(
            text,
            layers=tuple(
                layer
                if layer.sliding_window_size < 0
                else replace(layer, sliding_window_size=size(layer.sliding_window_size))
                for layer in layers
            ),
            every_row=True,
        )

    yield with_windows(
        "sliding_window_size does not reach the kernel: the result is right without a window", lambda _: -1
    )
    yield with_windows(
        "the window is one too wide, since sliding_window_size counts the tokens before a row's own: the result is "
        "right with one KV token more",
        lambda size: size + 1,
    )
    if all(layer.sliding_window_size for layer in layers):
        yield with_windows(
            "the window is one too narrow, since sliding_window_size counts the tokens before a row's own: the result "
            "is right with one KV token less",
            lambda size: size - 1,
        )
    if page > 1:
        at, key = data.query_positions[:, :, None], data.key_positions[:, None]
        yield _with_seen(
            e,
            "the window is cut to whole pages: the result is right if a row sees only the last (sliding_window_size + "
            "1) // page_size pages, its own included",
            lambda size: key // page > at // page - max(1, (size + 1) // page),
        )
        yield _with_seen(
            e,
            "the window is widened to whole pages: the result is right if a row sees all of the page in which its "
            "window begins",
            lambda size: key >= (at - size).clamp(min=0) // page * page,
        )
    if max((request.new for request in e.step.requests), default=0) > 1:
        yield Supposed(
            "a layer with a window keeps its KV tokens in a ring, and later rows of the step overwrite those that its "
            "earlier rows still need: the result is right if each place of a ring of sliding_window_size + 1 holds its "
            "newest KV token",
            _in_rings(e, layers),
            every_row=True,
        )


def _with_seen(e: Evidence, text: str, near: Callable[[int], torch.Tensor]) -> Supposed:
    """An answer in which ``near``, [B, T, S] bool of a size, takes the place of the window in layers that have one."""
    data, layers = e.expected.data, make_layers(e.schedule.case)
    free = tuple(replace(layer, sliding_window_size=-1) for layer in layers)
    seen = [
        own if layer.sliding_window_size < 0 else own & near(layer.sliding_window_size)
        for layer, own in zip(layers, (seen_in(data.visible, data, each) for each in free), strict=True)
    ]
    return Supposed(text, replace(data, allowed=torch.stack(seen)), free, every_row=True)


def _in_rings(e: Evidence, layers: tuple[AttentionLayer, ...]) -> StepData:
    """Data in which a KV token of a windowed layer holds the newest one of its place in the ring (litgpt #2182)."""
    data, lens = e.expected.data, torch.tensor(e.lens)[:, None]
    key = torch.arange(data.visible.shape[-1])

    def overwritten(stored: torch.Tensor) -> torch.Tensor:
        found = stored.clone()
        for index, layer in enumerate(layers):
            if layer.sliding_window_size >= 0:
                newest = lens - 1 - (lens - 1 - key) % (layer.sliding_window_size + 1)
                newest = torch.where(key < lens, newest.clamp(min=0), key)
                rows = bytes_if_fp8(stored[index])
                bytes_if_fp8(found)[index] = rows.gather(1, newest[:, :, None, None].expand_as(rows))
        return found

    values = None if data.stored_values is None else overwritten(data.stored_values)
    return replace(data, stored_keys=overwritten(data.stored_keys), stored_values=values)


@hint(Level.PLACE, silences=("length_threshold",))
def only_longer_than_the_window(e: Evidence) -> str:
    """Only layers with a window are wrong, and in them exactly the requests that are longer than it."""
    windows = {layer.sliding_window_size for layer in make_layers(e.schedule.case) if layer.sliding_window_size >= 0}
    # A NaN of another slot says nothing about the window: the slot may have no weight.
    if (
        e.attended is not None
        or e.misrouted
        or e.reads_foreign
        or len(windows) != 1
        or not (widths := with_a_window_alone(e))
    ):
        return ""
    (window,) = windows
    longer = [request for request, length in enumerate(e.lens) if length > window + 1]
    if not longer or e.wrong != longer or len(longer) == e.step.bs:
        return ""
    where = " in the graph" if e.in_graph else ""
    return (
        f"the window, or its first KV token, is probably wrong{where}: only layers with a window ({widths}) are wrong, "
        "and in them exactly the requests that are longer than it"
    )
