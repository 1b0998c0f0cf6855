"""Sparse attention: selected KV tokens that a row lost, and others that it attended to."""

from __future__ import annotations

from dataclasses import dataclass

from ...cases.selection import Selection
from ...families.sparse.data import heads_with_keys
from ...families.sparse.family import with_selection
from ...steps.schedule import Request
from ..attended_keys import AttendedKeys, ranges, seen_by_heads
from .evidence import Evidence
from .hint import Level, hint
from .numbers import scale_of_values


@dataclass(frozen=True)
class _Row:
    """The row that was examined."""

    e: Evidence
    a: AttendedKeys

    @property
    def lost(self) -> frozenset[int]:
        """Selected KV tokens without weight."""
        return self.a.wanted - self.a.used

    @property
    def extra(self) -> frozenset[int]:
        """KV tokens with weight that were not selected."""
        return self.a.used - self.a.wanted

    @property
    def selection(self) -> Selection:
        """The selection of the case."""
        found = self.e.schedule.case.selection
        assert found is not None
        return found

    @property
    def request(self) -> Request:
        """Request of the row."""
        return self.e.step.requests[self.a.request]

    @property
    def selects_itself(self) -> bool:
        """True if the backend has an indexer."""
        return self.e.schedule.case.indexer is not None

    def listed(self) -> list[int]:
        """Entries of its row of ``selected``, as places in the request; empty if they are slots or blocks."""
        data = with_selection(self.e.schedule, self.e.expected.data)
        if data.selected is None or self.selects_itself or self.selection.slots or self.selection.block > 1:
            return []
        mine = (data.row_request == self.a.request) & (data.row_offset == self.a.row)
        wrong = self.e.comparison.wrong.flatten(2).any(-1) & mine
        if not bool(wrong.any()):
            return []
        layer, row = wrong.nonzero()[0].tolist()
        listed = data.selected[layer, row]
        found: list[int] = (listed[self.kv_head] if data.by_head else listed).tolist()
        return found

    @property
    def kv_head(self) -> int:
        """KV head of the head that was examined."""
        heads = self.e.schedule.case.heads
        return self.a.head // (heads.q_heads // heads.kv_heads)


def _row(e: Evidence) -> _Row:
    assert e.attended is not None
    return _Row(e, e.attended)


def _other_keys(e: Evidence) -> bool:
    """True if the row that was examined attended to other KV tokens than the selected ones."""
    return e.attended is not None and not e.attended.right and bool(e.attended.wanted)


@hint(Level.GUESS, when=lambda e: not e.comparison.all_finite and not e.reads_foreign, family="sparse")
def holes_give_nan(e: Evidence) -> str:
    """Results are not finite because of entries of -1 between others, or before all others."""
    selection = e.schedule.case.selection
    if selection is None or e.changed is None or not e.changed.right_without("holes"):
        return ""
    what = "blocks" if selection.block > 1 else "keys"
    return (
        f"entries of -1 between the selected {what} give NaN: the case passes without them. If the first ones are -1, "
        "a running maximum is still minus infinity, and minus infinity less minus infinity is NaN"
    )


@hint(Level.PATTERN, when=lambda e: not e.comparison.all_finite and not e.reads_foreign, family="sparse")
def rows_without_keys_give_nan(e: Evidence) -> str:
    """All wrong values are NaN, in rows that select no key; other rows exist."""
    comparison, data = e.comparison, with_selection(e.schedule, e.expected.data)
    if data.allowed is None:
        return ""
    seen = heads_with_keys(data)
    wrong = comparison.wrong.any(-1)
    is_nan = comparison.out.isnan().any(-1)
    if not wrong.any() or not seen.any() or bool((wrong & (seen | ~is_nan)).any()):
        return ""
    others = " Some of these rows are right, so look at where in the batch a row is." if (~seen & ~wrong).any() else ""
    weight = " With sinks all of its weight is the sink's." if e.schedule.case.sinks else ""
    return (
        "rows that select no key give NaN, and all others are right: the output of such a row is 0, and not 0 / 0 or "
        f"minus infinity less minus infinity.{weight}{others}"
    )


@hint(Level.GUESS, family="sparse")
def values_by_a_factor(e: Evidence) -> str:
    """The selected KV tokens are right, and their weights do not sum to 1."""
    a = e.attended
    if a is None or not a.right or a.normalised or e.schedule.case.kv_dtype == "same":
        return ""
    return scale_of_values(e, a) or (
        f"the selected KV tokens are right, and their weights sum to {a.total:.3g} instead of 1: probably scales of "
        f"rows ({e.schedule.case.kv_dtype}) are not applied, are those of other rows, or are read elsewhere"
    )


@hint(Level.PATTERN, family="sparse")
def layers_that_share_a_selection(e: Evidence) -> str:
    """Layers that select are right, and layers that use their selections are wrong."""
    indexer = e.schedule.case.indexer
    if indexer is None or not indexer.shared:
        return ""
    # For each layer, the number of layers after the one that selects.
    after = [place - indexer.source(place) for place in range(len(e.wrong_layers))]
    wrong = {each for each, bad in zip(after, e.wrong_layers, strict=True) if bad}
    if not wrong or 0 in wrong:
        return ""
    if 1 in wrong:
        return (
            "only layers that use the selection of a layer before them are wrong: probably they read indices that "
            "another layer, batch or step has stored since, or look indices up that were looked up before"
        )
    return (
        "layers that use a selection are right directly after the layer that selects, and wrong later: probably a "
        "layer that uses a selection does not hand it on"
    )


@hint(Level.PATTERN, family="sparse")
def later_forwards_of_a_draft(e: Evidence) -> str:
    """The first forward of a draft is right, and forwards that use its selection are wrong."""
    indexer, data = e.schedule.case.indexer, e.expected.data
    if indexer is None or not indexer.first or not e.rows or not bool((data.row_offset[e.rows] > 0).all()):
        return ""
    return (
        "only later forwards of a draft are wrong, which attend to what the first one selected: probably they read "
        "rows of other requests, as if a request had several, or a forward without an indexer clears or stores the "
        "selection"
    )


@hint(Level.PLACE, when=_other_keys, family="sparse")
def other_index_space(e: Evidence) -> str:
    """A row reads none of its selected KV tokens, as if their indices had another meaning."""
    row = _row(e)
    if row.a.used or row.selects_itself:
        return ""
    if row.selection.space == "pages":
        return "" if row.a.elsewhere else (
            "no selected KV token is read. Indices of this case are pages of the pool: probably they are taken for "
            "blocks of the request, and looked up in the page table"
        )  # fmt: skip
    if row.selection.block > 1:
        return "" if not row.a.elsewhere else (
            "no selected KV token is read, but other slots are. Indices of this case are blocks of the request: "
            "probably they are treated as pages of the pool, and not looked up in the page table"
        )  # fmt: skip
    if row.selection.slots:
        return "" if row.a.elsewhere else (
            "no selected KV token is read. Indices of this case are slots of the pool: probably they are taken for "
            "positions, and looked up in the request table or compared with the length"
        )  # fmt: skip
    if not row.a.elsewhere:
        return ""
    if e.schedule.case.kv_layout != "nhd":
        return (
            "no selected KV token is read, but other slots are: probably a slot is addressed by its number times the "
            f"width of a row, and not by the strides of the pool (KV layout {e.schedule.case.kv_layout})"
        )
    return (
        "no selected KV token is read, but other slots are. Indices of this case are positions in the request: "
        "probably they are treated as slots of the pool, and not looked up in the request table"
    )


@hint(Level.PLACE, when=_other_keys, silences=("keys_that_were_not_selected",), family="sparse")
def keys_of_another_head(e: Evidence) -> str:
    """A head attends to exactly the KV tokens that another KV head of its row selected."""
    row = _row(e)
    if not row.selection.per_kv_head or row.a.elsewhere or not row.a.used:
        return ""
    seen = seen_by_heads(e.schedule, e.expected, row.a.layer, (row.a.request, row.a.row))
    group, own = len(seen) // e.schedule.case.heads.kv_heads, row.kv_head
    selected = [row.a.looked_at & frozenset(each.nonzero().flatten().tolist()) for each in seen[::group]]
    others = [head for head, keys in enumerate(selected) if head != own and keys == row.a.used]
    if not others:
        return ""
    return (
        f"head {row.a.head} of KV head {own} attends to what KV head {others[0]} selected: query head h uses the "
        f"selection of KV head h // {group}, which is `selected[row, h // {group}]` of [T, Hk, topk]"
    )


@hint(Level.PLACE, when=_other_keys, family="sparse")
def lost_selected_keys(e: Evidence) -> str:
    """Selected KV tokens have no weight in a row, and no other tokens have any."""
    row = _row(e)
    lost, listed = row.lost, row.listed()
    if not lost or row.extra or row.a.elsewhere or not row.a.used:
        return ""
    if row.selects_itself:
        new = min(lost) >= row.request.prefix
        return "" if not new else (
            f"a row loses KV tokens {ranges(sorted(lost))}, which are new in this step: probably they are scored "
            "before they are stored, or a length does not count them"
        )  # fmt: skip
    if row.selection.block > 1:
        of = "another row or KV head" if row.selection.per_kv_head else "another row"
        return (
            f"a row loses KV tokens {ranges(sorted(lost))} of its selected blocks: probably it reads as many entries "
            f"as {of} has, or cuts off a block as if it held the row's own key"
        )
    columns = [column for column, key in enumerate(listed) if key in lost]
    if not columns:
        return ""
    text = (
        f"a row loses {len(lost)} of its {len(row.a.wanted)} selected KV tokens, which are in columns "
        f"{ranges(columns)} of its row of `selected`"
    )
    kept = [column for column, key in enumerate(listed) if key in row.a.used]
    seen = row.request.prefix + row.a.row + 1
    if max(kept) < seen <= min(columns):
        text += f": probably it reads {seen} entries, one per key that it may see, whatever the entries are"
    elif max(kept) < min(columns):
        text += f": probably it reads no column after {min(columns) - 1}"
    return text


@hint(Level.PLACE, when=_other_keys, family="sparse")
def keys_that_were_not_selected(e: Evidence) -> str:
    """KV tokens have weight in a row that did not select them."""
    row = _row(e)
    extra, lost, block = row.extra, row.lost, row.selection.block
    if not extra or row.a.elsewhere:
        return ""
    which = f"a row attends to KV tokens {ranges(sorted(extra))}, which it did not select"
    if lost:
        reason = (
            f"block numbers are multiplied by a number other than the {block} keys of a block"
            if block > 1
            else "indices of another row, layer or step, or of another index space"
        )
        of_head = " or they are those of another KV head" if row.selection.per_kv_head else ""
        return f"{which}, and loses {ranges(sorted(lost))}: probably {reason}{of_head}"
    if extra == frozenset(range(block)):
        name = f"block 0 (KV tokens 0..{block - 1})" if block > 1 else "KV token 0"
        return (
            f"a row attends to {name}, which it did not select: probably an entry of -1 that is loaded as "
            f"{'block' if block > 1 else 'key'} 0 and not masked"
        )
    return (
        f"{which}, in addition to all that it did: probably entries after its last index, or a mask that lets more "
        "through than the selection"
    )
