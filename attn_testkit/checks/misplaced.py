"""Contents of a wrong slot: the row of another token, a displacement, or changed values."""

from __future__ import annotations

import torch

from ..contract.row_format import PackedRows
from ..steps.data import make_layers
from ..steps.kv_groups import group_of_place
from .describe import index_ranges
from .observation import Observation
from .wrong_planes import differing, names_of_planes, scales_held, wrong_planes

UNOWNED, NEW, OLD = 0, 1, 2
"""Owners of a slot: none, a token of this step, an earlier token."""

PADDING_GOES = (
    "Padding belongs in slot 0: use out_cache_loc of the whole graph's batch, or reset the tail of your own buffer at "
    "every replay"
)
STRIDED_HEADS = (
    "in this case they are strided (takes_strided_heads), so head h is at token * stride(0) + h * stride(1), and not "
    "at token * stride(0) + h * head_dim. Use both strides; or, if the heads of your server are contiguous, do not "
    "declare takes_strided_heads"
)


def held_instead(
    observed: Observation,
    got: torch.Tensor,
    want: torch.Tensor,
    owner: torch.Tensor,
    at: tuple[int, int, int],
    *,
    padded: bool,
    strided_heads: bool = False,
) -> str:
    """Describe the contents of a wrong slot. ``got``, ``want`` [L, K and V, slots after page 0, ...].

    ``padded``: true if a padded row may be there. ``strided_heads``: true if heads of new k and v are strided.
    """
    (layer, part, slot), case = at, observed.schedule.case
    row, page = got[layer, part, slot], observed.pool.shape[2] - got.shape[2]
    new = (owner == NEW).nonzero().flatten()
    if observed.step.stored:
        return _nothing_to_store(observed, got, want, owner, at)
    padding = f"; or a padded row was stored over it. {PADDING_GOES}" if padded else ""
    same = (want[:, :, new] == row).flatten(3).all(-1).nonzero().tolist()
    if same:
        places = {(a, b): int(new[c]) for a, b, c in same}
        if (layer, part) in places:
            whose = owner_text(observed, places[layer, part] + page)
            shifted = _shifted(observed, got[layer, part], want[layer, part], new, page)
            cause = shifted or "probably the row order, a stride, or a wrong slot"
            return f"it holds the row of the {whose}: {cause}{_group_alone(observed, got, want, new)}{padding}"
        other = "the other layer's row" if (layer, 1 - part) not in places else "K instead of V, or V instead of K"
        return f"it holds {other}"
    layout = case.kv_layout
    if owner[slot] != NEW:
        if packed := _packed(observed):
            for plane in packed.scale_planes:
                held, due = (packed.raw(_bytes(each[layer, part]), plane) for each in (got, want))
                if text := _other_order(observed, held, due, owner, part, plane.name):
                    return text
            if planes := _only_some_planes(observed, got, want, owner, at):
                return f"{planes}: probably a store that is wider than a row, or that resets scales of other tokens"
        if text := _other_order(observed, got[layer, part], want[layer, part], owner, part):
            return text
        planes = _only_some_planes(observed, got, want, owner, at)
        # A store that puts rows elsewhere leaves their own slots wrong, too.
        if planes and not _packed(observed) and not got[layer, part, new].equal(want[layer, part, new]):
            return f"{planes}: probably slots, strides, or the order of heads and tokens in one of the two stores"
        return "" if layout == "nhd" else f"the KV pool of this case has layout {layout}: use all of its strides"
    if bool((row == got[layer, part][owner == UNOWNED][:1]).all()):
        if text := _one_row_each(observed, got, want, new + page):
            return text
        return f"it was not written, or a padded row overwrote it with NaN{_where_alone(observed, got, want, new)}"
    packed = _packed(observed)
    if packed and (
        text := wrong_planes(
            packed, _bytes(row), _bytes(want[layer, part, slot]), _rows_besides(observed, want, owner, at)
        )
    ):
        return text
    if _beyond_fp8(observed, row, want[layer, part, slot]):
        return "it holds NaN for values beyond the largest FP8 number, else the right row: a store must saturate"
    if scaled := _scaled(observed, row, want[layer, part, slot], layer, part):
        return scaled
    if _neighbours(observed, row, want[layer, part, slot]):
        return (
            "it holds FP8 values one step from the right ones: probably a quotient that is first rounded to 16 bits, "
            "or "
            "truncated instead of rounded"
        )
    if factor := _by_a_factor(observed, row, want[layer, part, slot], layer, part):
        return factor
    if text := _other_order(observed, got[layer, part], want[layer, part], owner, part):
        return text
    if some := _some_heads(row, want[layer, part, slot]):
        return f"{some}{padding}{_HEADS_ARE if strided_heads else ''}"
    if row.view(observed.pool.dtype).float().isnan().all() and not padded:
        return (
            "it holds only NaN, but not the NaN of an unowned slot: the old contents of the slot were probably added "
            "to or scaled"
        )
    if not row.any() and not padded:
        return "it holds only zeros: its row was not stored, or was cleared again"
    laid = "" if layout == "nhd" else f"; the KV pool of this case has layout {layout}: use all of its strides"
    fp8 = ", and an FP8 pool holds K / k_scale" if observed.pool.dtype.itemsize == 1 and not packed else ""
    views = f"k and v may be strided views of one tensor{fp8}{laid}{_HEADS_ARE if strided_heads else ''}"
    if padded:
        return f"it holds no live row of this step: a padded row was stored over it. {PADDING_GOES}. Or {views}"
    return f"it holds no live row of this step: {views}"


def _other_order(
    observed: Observation, got: torch.Tensor, want: torch.Tensor, owner: torch.Tensor, part: int, what: str = ""
) -> str:
    """Describe new rows of which each head lies where it would if a page had its heads before its tokens, or its tokens
    before its heads, and the pool has the other order. ``got``, ``want`` [slots after page 0, Hk, D], or only a plane
    of them, which is named ``what``.
    """
    size, heads = observed.schedule.case.page_size, got.shape[1]
    if size == 1 or heads == 1 or got.dim() != 3:
        return ""
    new = (owner == NEW).nonzero().flatten()
    slot, head = new.repeat_interleave(heads), torch.arange(heads).repeat(len(new))
    start, token = slot // size * size, slot % size
    tokens_first, heads_first = token * heads + head, head * size + token
    for order, at, of_head in (
        ("heads of a page were before its tokens", heads_first // heads, heads_first % heads),
        ("tokens of a page were before its heads", tokens_first % size, tokens_first // size),
    ):
        moved = (at != token) | (of_head != head)
        lies = (got[start + at, of_head] == want[slot, head]).all(-1)
        if int(moved.sum()) >= _FEW_MOVED and bool(lies.all()):
            if what:
                return f"{what} of new rows of {'KV'[part]} are stored as if {order}, as in a pool of another layout"
            return (
                f"new rows of {'KV'[part]} are stored as if {order}: each head of a row lies where that order puts it"
            )
    return ""


def _one_row_each(observed: Observation, got: torch.Tensor, want: torch.Tensor, new: torch.Tensor) -> str:
    """Describe a store of only the first new row, or only the last, of each request (1bit-MONSTER #686). ``new``: slots
    of this step's tokens."""
    page = observed.pool.shape[2] - got.shape[2]
    wrong = {int(slot) for slot in new if not torch.equal(got[:, :, slot - page], want[:, :, slot - page])}
    rows = [request.slots[request.prefix :].tolist() for request in observed.step.requests if request.new]
    branches = any(request.draft for request in observed.step.requests)
    if branches or max((len(each) for each in rows), default=0) < 2:
        return ""
    for which, kept in (("first", slice(0, 1)), ("last", slice(-1, None))):
        if wrong and wrong == {slot for each in rows for slot in each if slot not in each[kept]}:
            return f"only the {which} new row of each request is stored, in every layer: a store of one row per request"
    return ""


_HEADS_ARE = f". For the heads of k and v: {STRIDED_HEADS}"


def _packed(observed: Observation) -> PackedRows | None:
    return observed.inputs.data.row_format if observed.inputs else None


def _bytes(row: torch.Tensor) -> torch.Tensor:
    return row.contiguous().view(torch.uint8)


def _nothing_to_store(
    observed: Observation, got: torch.Tensor, want: torch.Tensor, owner: torch.Tensor, at: tuple[int, int, int]
) -> str:
    """Hint for a step that may write nothing, because the pool held its K and V already."""
    layer, part, slot = at
    row = got[layer, part, slot]
    stored = "save_kv_cache was False, so k and v must not be stored: the pool held the new K and V already"
    if bool((want[:, :, owner == NEW] == row).flatten(3).all(-1).any()) or not (
        planes := _only_some_planes(observed, got, want, owner, at)
    ):
        return stored
    return f"{planes}. save_kv_cache was False: the pool held the new K and V already, and nothing may write to it"


def _only_some_planes(
    observed: Observation, got: torch.Tensor, want: torch.Tensor, owner: torch.Tensor, at: tuple[int, int, int]
) -> str:
    """Name the planes of K and V in which slots of this owner are wrong, and their contents, if other planes are
    right."""
    layer, part, slot = at
    same_owner = owner == owner[slot]
    held, due = (_bytes(each[:, :, same_owner]) for each in (got, want))
    packed, parts = _packed(observed), ("K", "V")[: got.shape[1]]
    wrong: list[str] = []
    every: list[str] = []
    for number, name in enumerate(parts):
        name = name if len(parts) > 1 else "latent"
        if packed is None:
            wrong += [name] * (not torch.equal(held[:, number], due[:, number]))
            every.append(name)
            continue
        wrong += names_of_planes(packed, differing(packed, held[:, number], due[:, number]), name)
        every += names_of_planes(packed, packed.format.planes, name)
    if not wrong or len(wrong) == len(every):
        return ""
    text = f"only {' and '.join(wrong)} changed, and {', '.join(each for each in every if each not in wrong)} did not"
    if packed is None:
        return text
    row, right = _bytes(got[layer, part, slot]), _bytes(want[layer, part, slot])
    others = _rows_besides(observed, want, owner, at)
    what = (
        scales_held(packed, plane, row, right, others) for plane in differing(packed, row, right) if plane.is_scales
    )
    found = next(filter(None, what), "")
    return f"{text}: {found}" if found else text


def _rows_besides(
    observed: Observation, want: torch.Tensor, owner: torch.Tensor, at: tuple[int, int, int]
) -> list[tuple[str, torch.Tensor]]:
    """Rows from which wrong scales may come: the other part, other layers, and other tokens of the step."""
    layer, part, slot = at
    page = observed.pool.shape[2] - want.shape[2]
    found = [
        (f"{'KV'[other]} instead of {'KV'[part]}", want[layer, other, slot])
        for other in range(want.shape[1])
        if other != part
    ]
    names = observed.schedule.case.layers.name
    found += [(names(other), want[other, part, slot]) for other in range(len(want)) if other != layer]
    new = [int(other) for other in (owner == NEW).nonzero().flatten()[:_MOST_MOVED] if int(other) != slot]
    found += [(f"the {owner_text(observed, other + page)}", want[layer, part, other]) for other in new]
    return [(name, _bytes(row)) for name, row in found]


def _by_a_factor(observed: Observation, row: torch.Tensor, want: torch.Tensor, layer: int, part: int) -> str:
    """Describe a row [Hk, ...] of bits whose wrong heads are right except for a positive factor, which is a scale."""
    packed, dtype, case = _packed(observed), observed.pool.dtype, observed.schedule.case
    if packed is None and dtype == torch.uint8:
        return ""
    held, due = ((packed.unpack(_bytes(each)) if packed else _bytes(each).view(dtype)).double() for each in (row, want))
    heads = (row != want).any(-1).nonzero().flatten().tolist()
    held, due = held[heads], due[heads]
    if not bool((held.isfinite() & due.isfinite()).all()) or any(len(each.unique()) < _DISTINCT for each in due):
        return ""
    factor = (held * due).sum(-1) / (due * due).sum(-1)
    far = torch.linalg.vector_norm(held - factor[:, None] * due, dim=-1) > _ROUNDED * torch.linalg.vector_norm(
        held, dim=-1
    )
    if bool(far.any()) or bool((factor <= 0).any()) or bool((factor.log2().abs() < _OFF).any()):
        return ""
    what, own = "KV"[part], make_layers(case)[layer]
    name, scale = f"{what.lower()}_scale", (own.k_scale, own.v_scale)[part]
    alike = float(factor.max() / factor.min()) < _SAME_FACTOR
    whose = "" if len(heads) == len(row) else f" of KV head{'s' * (len(heads) > 1)} {index_ranges(heads)} of {len(row)}"
    times = f"{factor[0]:.3g}" if alike else f"{', '.join(f'{each:.3g}' for each in factor[:4].tolist())} by head"
    known = (
        f", which is {text}"
        for value, text in ((scale, name), (1 / scale, f"1 / {name}"))
        if alike and scale != 1 and max(value / factor[0], factor[0] / value) < _SAME_FACTOR
    )
    return (
        f"it holds {what}{whose} times {times}{next(known, '')}, else the right row: only a scale is wrong, such as "
        "that of another head, token or layer, or one that is missing or applied twice"
    )


_SAME_FACTOR = 1.05
"""Ratio of two factors that rounding explains."""
_ROUNDED, _DISTINCT, _OFF = 0.15, 8, 0.1
"""Part of a row that rounding may change; fewest different values in it that prove a factor; smallest distance of that
factor from 1, in powers of two."""


def _shifted(observed: Observation, got: torch.Tensor, want: torch.Tensor, new: torch.Tensor, page: int) -> str:
    """Describe by how many positions or slots new rows are misplaced, if the distance is the same for all.

    ``got``, ``want`` [slots after page 0, Hk, D]; ``new``: slots of this step's tokens among them.
    """
    misrouted = new[(got[new] != want[new]).flatten(1).any(-1)].tolist()[:_MOST_MOVED]
    moved = []
    for slot in misrouted:
        lies = (got == want[slot]).flatten(1).all(-1).nonzero().flatten().tolist()
        moved += [(slot + page, at + page) for at in lies[:1] if len(lies) == 1]
    if len(moved) < max(_FEW_MOVED, len(misrouted) / 2):
        return ""
    places = {slot: (i, at) for i, r in enumerate(observed.step.requests) for at, slot in enumerate(r.slots.tolist())}
    shift = _positions_off(places, moved)
    if shift:
        count, variant = abs(shift), "forward" if shift > 0 else "back"
        return (
            f"new rows are stored {count} position{'s' if count > 1 else ''} too far {variant}: probably the length or "
            "prefix "
            "that positions are counted from"
        )
    by_slot = {to - of for of, to in moved}
    if len(by_slot) == 1:
        return f"new rows are {by_slot.pop():+d} slots off: look at how out_cache_loc becomes an address"
    return ""


def _positions_off(places: dict[int, tuple[int, int]], moved: list[tuple[int, int]]) -> int:
    """Number of positions by which all rows that are still in their request are displaced; 0 if it varies. ``places``:
    slot -> request and position. Table entries after a request's end may be any slot.
    """
    slots = {place: slot for slot, place in places.items()}
    shifts = [places[to][1] - places[of][1] for of, to in moved if to in places and places[to][0] == places[of][0]]
    for shift in dict.fromkeys(shifts):
        due = [(slots.get((places[of][0], places[of][1] + shift)), to) for of, to in moved]
        within = [slot == to for slot, to in due if slot is not None]
        if len(within) >= _FEW_MOVED and all(within):
            return shift
    return 0


_MOST_MOVED = 16
"""Number of new rows for which the pool is searched."""
_FEW_MOVED = 2
"""Fewest rows among which a common displacement counts."""


def _where_alone(observed: Observation, got: torch.Tensor, want: torch.Tensor, new: torch.Tensor) -> str:
    """Name the layers with wrong new rows if others are right, and the layout of the pool if it is not the default."""
    case = observed.schedule.case
    wrong = (got != want)[:, :, new].flatten(1).any(-1).nonzero().flatten().tolist()
    if len(wrong) < len(got):
        names = ", ".join(case.layers.name(layer) for layer in wrong)
        return (
            f", only in {names}: look at what is special about these layers, such as a window, a KV group or other "
            "slots"
        )
    if case.kv_layout == "nhd":
        return ""
    return f"; the KV pool of this case has layout {case.kv_layout}: reshaping such a pool may give a copy, not a view"


def _group_alone(observed: Observation, got: torch.Tensor, want: torch.Tensor, new: torch.Tensor) -> str:
    """Name the KV group, after the first, if exactly its layers have wrong new rows."""
    schedule = observed.schedule
    if schedule.case.encoder_len:
        return ""  # groups store rows of their own, which differ in number
    wrong = (got != want)[:, :, new].flatten(1).any(-1).tolist()
    groups = [group_of_place(schedule, layer) for layer in range(len(got))]
    found = {group for group, bad in zip(groups, wrong, strict=True) if bad}
    if len(found) != 1 or 0 in found or any(bad != (group in found) for group, bad in zip(groups, wrong, strict=True)):
        return ""
    return f", only in the layers of KV group {found.pop()}: new rows of a group go to its own group_cache_locs"


def _scaled(observed: Observation, row: torch.Tensor, want: torch.Tensor, layer: int, part: int) -> str:
    """Describe a row of bits whose values are right except for the scale of the FP8 pool, which is missing or applied
    twice."""
    if observed.pool.dtype.itemsize > 1 or observed.pool.dtype == torch.uint8:
        return ""
    held, due = (each.view(torch.uint8).view(observed.pool.dtype).double() for each in (row, want))
    known = (held.abs() > _SOME_BITS) & (due.abs() > _SOME_BITS) & (held.abs() < held.abs().amax().clamp(min=1.0))
    name, own = ("k_scale", "v_scale")[part], make_layers(observed.schedule.case)[layer]
    scale = (own.k_scale, own.v_scale)[part]
    if not known.any() or max(scale, 1 / scale) < _TELLING:
        return ""
    ratio = held[known] / due[known]
    what = "K" if part == 0 else "V"
    for factor, text in (
        (scale, f"it holds unscaled {what}: an FP8 pool holds {what} / {name}"),
        (scale**2, f"it holds {what} * {name}: an FP8 pool holds {what} / {name}"),
        (1 / scale, f"it holds {what} divided by {name} twice"),
    ):
        if bool(((ratio / factor - 1).abs() < _TWO_ROUNDINGS).all()):
            return text
    return ""


_SOME_BITS = 2.0**-4
"""FP8 magnitude below which numbers have few bits."""
_TELLING, _TWO_ROUNDINGS = 1.5, 0.2
"""Smallest factor that counts as a different scale, and the error that rounding to FP8 may cause in the ratio of two
numbers."""


def _some_heads(row: torch.Tensor, want: torch.Tensor) -> str:
    """Name the wrong KV heads of a row if others are right. ``row``, ``want`` [Hk, D]: bits."""
    right = (row == want).all(-1)
    if not right.any():
        return ""
    wrong = (~right).nonzero().flatten().tolist()
    name = f"KV head{'s' if len(wrong) > 1 else ''} {index_ranges(wrong)} of {len(row)}"
    return (
        f"{name} {'are' if len(wrong) > 1 else 'is'} wrong in it, and the others are right: probably a store of too "
        "few heads, or with a wrong stride of heads"
    )


_NAN_OF_E4M3, _LARGEST_OF_E4M3 = 0x7F, 0x7E


def _beyond_fp8(observed: Observation, row: torch.Tensor, want: torch.Tensor) -> bool:
    """True if ``row`` differs from ``want`` only by NaN instead of the largest number. Bits of an FP8 pool."""
    if observed.pool.dtype is not torch.float8_e4m3fn:
        return False
    off = row != want
    size = row.view(torch.uint8)[off] & 0x7F, want.view(torch.uint8)[off] & 0x7F
    return bool(off.any() and (size[0] == _NAN_OF_E4M3).all() and (size[1] == _LARGEST_OF_E4M3).all())


def _neighbours(observed: Observation, row: torch.Tensor, want: torch.Tensor) -> bool:
    """True if every value of ``row`` that differs from ``want`` is the neighboring FP8 value. Bits of an FP8 pool."""
    if observed.pool.dtype.itemsize > 1 or observed.pool.dtype == torch.uint8:
        return False
    off = row != want
    held, due = row.view(torch.uint8)[off].int(), want.view(torch.uint8)[off].int()
    return bool(off.any() and ((held - due).abs() == 1).all() and ((held ^ due) < _SIGN).all())


_SIGN = 0x80


def owners(observed: Observation, slots: int) -> torch.Tensor:
    """Owners [slots] int64: 0 none, 1 a token of this step, 2 an earlier token of a live request."""
    owner = torch.zeros(slots, dtype=torch.int64)
    for request in observed.step.requests:
        owner[torch.from_numpy(request.slots[: request.prefix])] = 1 if request.stores_encoder else 2
        owner[torch.from_numpy(request.copies).flatten()] = 2
        owner[torch.from_numpy(request.slots[request.prefix :])] = 1
    return owner


def owner_text(observed: Observation, slot: int) -> str:
    """Name the token that owns a slot."""
    for i, request in enumerate(observed.step.requests):
        found = (request.slots == slot).nonzero()[0]
        if len(found):
            position = int(found[0])
            kind = "new" if position >= request.prefix else "earlier"
            if position < request.encoder_len:
                return f"encoder key {position} of request {i}, which only cross-attention layers store"
            position -= request.encoder_len
            return f"{kind} token at position {position} of request {i}"
    return "owned by no live request"
