"""The recurrence in float64, one token after another: the only definition of right for states, and its limits.

A rounding of step t moves a row S[v, :] of a state by at most l_t. Earlier roundings are multiplied by the decay.
Roundings of different tokens are not aligned, so they add up as a random walk:

    w_t^2 = (decay_t w_{t-1})^2 + l_t^2

and a row may be off by twice that walk. The plain sum of all l_t is of no use: after a few hundred tokens of weak decay
it exceeds the state. Simulated float32 kernels with a stored bf16 state were off by 1.13 walks at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ...contract import StateLayer
from ...watches.signaling_nan import fill_with_signaling_nan
from ..rounding import FLOAT32, FLUSHED, SMALLEST, UNIT_ROUNDOFF, rounding
from .chunks import ChunkedStates
from .data import StateStepData
from .levels import Token, step_of_levels
from .rwkv import growth, log_decays, removal_of

_WALKS = 2.0
"""Limit of the error of a row, in walks."""
_IN_EXP = 8
"""Roundings of a gate, in addition to roundings of its argument."""


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Results of a step, float64. L layers, B requests, T rows."""

    out: torch.Tensor
    """[L, T, Hv, V]."""
    out_limit: torch.Tensor
    """[L, T, Hv, V]."""
    states: torch.Tensor
    """[L, E, Hv, V, K] after the step, of each of ``StateStepData.ends``."""
    state_limit: torch.Tensor
    """[L, E, Hv, V]: limit of the norm of a row of a state, and of each of its elements."""
    state_off: torch.Tensor
    """[L, E, Hv, V]: the part of ``state_limit`` that the rounding of the stored state does not add."""
    windows: torch.Tensor
    """[L, E, C, columns] in the model's dtype after the step: copies of inputs. Bits of NaN where nothing is stored."""


@dataclass(frozen=True, eq=False)
class Start:
    """States and windows before a step: drawn, or those after the accepted rows of the step before it."""

    states: torch.Tensor
    """[L, B, Hv, V, K] float64."""
    walk: torch.Tensor
    """[L, B, Hv, V]: error that rounding in earlier steps may have caused."""
    windows: torch.Tensor
    """[L, B, C, W - 1 and ``StateStepData.history``] in the model's dtype."""


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Inputs of the recurrence, [L, T, Hv, ...] float64, and the limit of each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_off: torch.Tensor
    """[L, T, Hv, 1]: norm of the error of q."""
    k_off: torch.Tensor
    v_off: torch.Tensor
    """[L, T, Hv, V]."""
    decay: torch.Tensor
    """[L, T, Hv, 1 or K]."""
    decay_off: torch.Tensor
    """[L, T, Hv, 1]: relative, largest of the channels."""
    beta: torch.Tensor
    """[L, T, Hv, 1]: factor of what is stored."""
    skip: torch.Tensor
    """[L, 1, Hv, 1]: D of Mamba2; 0 elsewhere."""
    growth: torch.Tensor
    """[L, T, Hv, 1]: the most by which a token multiplies earlier errors."""
    reads: torch.Tensor
    """[L, T, Hv, K or 0]: vector that reads what a token removes from the state before its decay, in RWKV-7; elsewhere
    without elements, as the three tensors below."""
    reads_off: torch.Tensor
    removes: torch.Tensor
    """[L, T, Hv, K or 0]: vector by which that is removed."""
    removes_off: torch.Tensor
    weights: torch.Tensor
    """[L, T, Hv, n + 1 or 0]: weights of levels, in log-linear attention."""
    weights_off: torch.Tensor


@lru_cache(maxsize=8)
def start_of(data: StateStepData) -> Start:
    """The states from which a step begins. Cached by the object."""
    before = data.before
    if before is None:
        return Start(data.states.double(), torch.zeros(data.states.shape[:-1], dtype=torch.float64), data.windows)
    found, places = recur(before), list(data.before_places)
    own = {(end.request, end.rows): index for index, end in reversed(list(enumerate(before.ends)))}
    at = [own[place, rows] if place >= 0 else 0 for place, rows in zip(places, data.before_rows, strict=True)]
    fresh = torch.tensor([place < 0 for place in places], dtype=torch.bool)[:, None, None]
    behind = {
        (place, rows): _window_behind(before, place, rows) for place, rows in zip(places, data.before_rows, strict=True)
    }
    windows = torch.stack([behind[each] for each in zip(places, data.before_rows, strict=True)], 1)
    return Start(
        found.states[:, at].masked_fill(fresh[..., None], 0.0),
        # The error of a stored state as a root of squares; ``state_limit`` is ``_WALKS`` times that.
        (found.state_limit[:, at] / _WALKS).masked_fill(fresh, 0.0),
        windows.masked_fill(fresh, 0.0),
    )


@lru_cache(maxsize=8)
def recur(data: StateStepData) -> Recurrence:
    """The answer for a step's data, with all limits. Cached by the object."""
    if not data.layers[0].of_kind.recurs:
        return _of_convolutions(data)
    every = [_inputs(layer, index, data) for index, layer in enumerate(data.layers)]
    inputs = _Inputs(
        **{name: torch.stack([getattr(one, name) for one in every]) for name in _Inputs.__dataclass_fields__}
    )
    delta = data.layers[0].of_kind.overwrites
    out, limit, states, walk = _loop(inputs, data, delta)
    # A number that is rounded stochastically moves by up to a whole unit, and not by half of one.
    unit = UNIT_ROUNDOFF[data.shape.dtype] * (2 if data.shape.rounding == "stochastic" else 1)
    norm = torch.linalg.vector_norm(states, dim=-1)
    floor = 4 * SMALLEST[data.shape.dtype] * data.shape.k_dim**0.5 + FLUSHED
    return Recurrence(
        out=out,
        out_limit=limit,
        states=states,
        state_limit=_WALKS * (walk**2 + (unit * norm) ** 2).sqrt() + floor,
        state_off=_WALKS * walk,
        windows=_windows(data),
    )


def _of_convolutions(data: StateStepData) -> Recurrence:
    """The answer for layers that compute nothing but a convolution: its output, and no state. The limit is twice the
    largest error, because the norm of a row gets half of it (``row_limit``)."""
    every = [convolved(layer, index, data) for index, layer in enumerate(data.layers)]
    heads, wide = data.layers[0].v_heads, data.layers[0].v_dim
    shape = len(data.layers), data.q.shape[1], heads, wide
    out, off = (torch.stack(each).view(shape) for each in zip(*every, strict=True))
    none = torch.zeros(len(data.layers), len(data.ends), heads, wide, dtype=torch.float64)
    return Recurrence(out, 2 * off + FLUSHED, none[..., None][..., :0], none, none, _windows(data))


def _loop(
    inputs: _Inputs, data: StateStepData, delta: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and their limits of all rows, and states and walks of all ends, token by token."""
    start = start_of(data)
    state, walk = start.states, start.walk
    if data.mistake is not None or 0 in data.news:
        # The first token is written in place.
        state, walk = state.clone(), walk.clone()
    out = torch.zeros_like(inputs.v)
    limit = torch.zeros_like(inputs.v)
    products = {"fp32": FLOAT32, "tf32": UNIT_ROUNDOFF["tf32"], "model": UNIT_ROUNDOFF[data.dtype]}[data.products]
    starts = torch.tensor([0, *data.news]).cumsum(0)[:-1]
    news, owner, rows = (
        torch.tensor(each, dtype=torch.int64)
        for each in (
            data.news,
            [end.request for end in data.ends],
            # A request may be cut short in a diagnosis, and then ends with its last row.
            [min(end.rows, data.news[end.request]) for end in data.ends],
        )
    )
    last, last_walk = (torch.empty(len(each), len(rows), *each.shape[2:], dtype=each.dtype) for each in (state, walk))

    def keep(count: int, ended: torch.Tensor, walk: torch.Tensor) -> None:
        """Keep what ends after this number of rows. By ``index_select``, which copies whole states."""
        done = (rows == count).nonzero()[:, 0]
        for kept, every in ((last, ended), (last_walk, walk)):
            kept.index_copy_(1, done, every.index_select(1, owner[done]))

    keep(0, state, walk)
    leveled = data.layers[0].of_kind.leveled
    # The mistakes of chunks are those of kinds with one state.
    chunks = None if data.mistake is None or leveled else ChunkedStates(data.mistake, state)
    places = _tokens_before(data)
    assert not leveled or not len(places) or int(data.positions.max()) + 1 < 1 << data.layers[0].levels
    behind: list[tuple[torch.Tensor, torch.Tensor]] = []
    for token in range(max(data.news, default=0)):
        if data.trees and token:
            # A node of a tree continues its parent, and not the row before it.
            parents = [behind[tree.parents[token - 1]] for tree in data.trees]
            state, walk = (
                torch.stack([both[part][:, request] for request, both in enumerate(parents)], 1) for part in (0, 1)
            )
        who = (news > token).nonzero()[:, 0]
        # Neither is written in place then, so that large states are not copied for each token.
        everybody = chunks is None and len(who) == len(news)
        at = (starts[who] + token).long()
        now = _Inputs(**{
            name: value if value.shape[1] == 1 and name == "skip" else value[:, at]
            for name, value in vars(inputs).items()
        })  # fmt: skip
        if chunks is not None:
            state = chunks.begun(token, state)
        mine = (state, walk) if everybody else (state[:, who], walk[:, who])
        if leveled:
            one = _step_of_levels(*mine, now, products, data, places[at])
        else:
            one = _step(*mine, now, delta, products, data, None if chunks is None else chunks.unread(who))
        if chunks is not None:
            chunks.note(who, state[:, who] * now.decay[..., None, :], one[0], now.decay)
        if everybody:
            state, walk, out[:, at], limit[:, at] = one
        else:
            state[:, who], walk[:, who], out[:, at], limit[:, at] = one
        if data.stored_each:
            stored = UNIT_ROUNDOFF[data.shape.dtype] * _norm(state)
            walk = (walk**2 + stored**2).sqrt()
        if data.trees:
            behind.append((state, walk))
        keep(token + 1, state if chunks is None else chunks.ended(state), walk)
    return out, limit, last, last_walk


def _step(
    state: torch.Tensor,
    walk: torch.Tensor,
    now: _Inputs,
    delta: bool,
    products: float,
    data: StateStepData,
    unread: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of some requests: state [L, b, Hv, V, K], walk [L, b, Hv, V] -> both after it, output, its limit.

    ``unread`` [L, b, Hv, V, K]: part of the state that the token does not read before it overwrites it; None: it reads
    all of it.
    """
    dim = state.shape[-1]
    # Factors of products that are subnormal numbers of the dtype: an element of what is stored, those of k, of the
    # state that k reads, and below those of the state that q reads and of q.
    lost = SMALLEST[data.dtype] / 2 if data.products == "model" else 0.0
    removed = _removed(state, now, products, lost, unread) if now.reads.shape[-1] else None
    delta = delta and removed is None
    state = state * now.decay[..., None, :]
    before = _norm(state)
    readable = state if unread is None else state - unread * now.decay[..., None, :]
    read = (readable @ now.k[..., None]).squeeze(-1) if delta else 0.0
    if removed is not None:
        state.sub_(removed[0])
    stored = now.beta * (now.v - read)
    state.add_(stored[..., None] * now.k[..., None, :])
    k_norm, q_norm = _norm(now.k)[..., None], _norm(now.q)[..., None]
    size, after = stored.abs(), _norm(state)
    held = now.beta * before * k_norm**2 if delta else torch.zeros_like(before)
    small = lost * (k_norm + dim**0.5 * (size + (now.beta * k_norm**2 if delta else 0.0)))
    moved = now.beta * (now.v_off + (before * now.k_off if delta else 0.0)) * k_norm + size * now.k_off
    rounded = (
        FLOAT32 * (2 * after + (dim**0.5 + 4) * held + (_IN_EXP + 4) * size * k_norm)
        + products * (size * k_norm + before)
        + now.decay_off * before
        + small
        + moved
        + (0.0 if removed is None else removed[1])
    )
    walk = ((now.growth * walk) ** 2 + rounded**2).sqrt()
    passed = now.skip * now.v
    out = (state @ now.q[..., None]).squeeze(-1) + passed
    unit = UNIT_ROUNDOFF[data.dtype]
    off = (
        q_norm * walk + now.q_off * after + (products + FLOAT32 * (dim**0.5 + 8)) * q_norm * after
        + lost * dim**0.5 * (q_norm + after)
        + now.skip.abs() * now.v_off + 4 * FLOAT32 * passed.abs() + unit * out.abs()
    )  # fmt: skip
    return state, walk, out, _WALKS * off + 4 * SMALLEST[data.dtype] + FLUSHED


def _step_of_levels(
    state: torch.Tensor, walk: torch.Tensor, now: _Inputs, products: float, data: StateStepData, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_step`` of log-linear attention: state [L, b, n * Hv, V, K], walk [L, b, n * Hv, V]. ``tokens`` [b] int64:
    tokens of each request before it."""
    dim, lost = state.shape[-1], SMALLEST[data.dtype] / 2 if data.products == "model" else 0.0
    stored, k_norm = now.beta * now.v, _norm(now.k)[..., None]
    size = stored.abs()
    own_off = (
        FLOAT32 * (_IN_EXP + 6) * size * k_norm
        + products * size * k_norm
        + lost * (k_norm + dim**0.5 * size)
        + now.beta * now.v_off * k_norm
        + size * now.k_off
    )
    token = Token(
        own=stored[..., None] * now.k[..., None, :], own_off=own_off, decay=now.decay,
        decay_off=now.decay_off, moved=2 * FLOAT32 + products, q=now.q, q_off=now.q_off,
        # The weight is a factor of q in a chunked kernel, and is rounded with it.
        read_off=2 * products + FLOAT32 * (dim**0.5 + 8), lost=lost, weights=now.weights,
        weights_off=now.weights_off, tokens=tokens,
    )  # fmt: skip
    state, walk, read, off = step_of_levels(state, walk, token, data.level_slip)
    passed = now.skip * now.v
    out = read + passed
    off = off + now.skip.abs() * now.v_off + 4 * FLOAT32 * passed.abs() + UNIT_ROUNDOFF[data.dtype] * out.abs()
    return state, walk, out, _WALKS * off + 4 * SMALLEST[data.dtype] + FLUSHED


def _tokens_before(data: StateStepData) -> torch.Tensor:
    """[T] int64: tokens of its request before each row, as the backend counts them."""
    if data.level_slip == "prefix only":
        return data.positions - data.row_offset
    if data.level_slip == "new tokens only":
        return data.row_offset
    return data.positions + (data.level_slip == "with the token")


def _removed(
    state: torch.Tensor, now: _Inputs, products: float, lost: float, unread: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix that a token of RWKV-7 removes from a state, [L, b, Hv, V, K], and the limit of its error [L, b, Hv,
    V]. ``state``: before its decay."""
    dim, before = state.shape[-1], _norm(state)
    readable = state if unread is None else state - unread
    read = (readable @ now.reads[..., None]).squeeze(-1)
    size, length = read.abs(), _norm(now.removes)[..., None]
    off = (
        FLOAT32 * ((dim**0.5 + 4) * before + 4 * size) * length
        + products * (size + before) * length
        + lost * dim**0.5 * (size + (before + dim**0.5) * length)
        + size * now.removes_off + before * now.reads_off * length
    )  # fmt: skip
    return read[..., None] * now.removes[..., None, :], off


def _norm(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norm


def _inputs(layer: StateLayer, index: int, data: StateStepData) -> _Inputs:
    mixed, off = convolved(layer, index, data)
    heads, values = (layer.k_heads, layer.k_dim), (layer.v_heads, layer.v_dim)
    sizes = [number * width for number, width in layer.channels]
    parts, offs = torch.split(mixed, sizes, -1), torch.split(off, sizes, -1)
    order = (0, 1, 2) if layer.of_kind.value_part else (2, 1, 0)
    shapes = heads, heads, values
    q, k, v = (parts[i].reshape(-1, *shape) for i, shape in zip(order, shapes, strict=True))
    q_off, k_off, v_off = (offs[i].reshape(-1, *shape) for i, shape in zip(order, shapes, strict=True))
    q, k, q_off, k_off = (each.repeat_interleave(values[0] // heads[0], 1) for each in (q, k, q_off, k_off))
    q_off, k_off = _norm(q_off)[..., None], _norm(k_off)[..., None]
    if layer.of_kind.normalizes:
        (q, q_off), (k, k_off) = _unit(q, q_off), _unit(k, k_off)
        q, q_off = q * layer.k_dim**-0.5, q_off * layer.k_dim**-0.5
    decay, decay_off, beta = gates_of_rows(layer, index, data)
    skip = torch.zeros(1, layer.v_heads, 1, dtype=torch.float64) if layer.D is None else layer.D.double().view(1, -1, 1)
    none = torch.zeros(*k.shape[:-1], 0, dtype=torch.float64)
    most = decay.amax(-1, keepdim=True)
    if layer.k_k is None:
        return _Inputs(
            q, k, v, q_off, k_off, v_off, decay, decay_off, beta, skip, most, none, none, none, none,
            *_weights(layer, data.v[index]),
        )  # fmt: skip
    of = removal_of(layer, k, data.v[index], decay, data.removal_slip)
    return _Inputs(
        q, of.key, v, q_off, of.key_off, v_off, decay, decay_off, beta, skip, growth(decay, of.reads, of.removes),
        of.reads, of.reads_off, of.removes, of.removes_off, none, none,
    )  # fmt: skip


def _weights(layer: StateLayer, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of levels [T, Hv, n + 1], and the limit of the error of each; without elements in other kinds."""
    if layer.level_weights is None:
        none = torch.zeros(len(b), layer.v_heads, 0, dtype=torch.float64)
        return none, none
    scaled = layer.level_weights.double() * b.double().view(len(b), *layer.level_weights.shape)
    weights = _softplus(scaled)
    return weights, FLOAT32 * (scaled.abs() + (_IN_EXP + 4) * weights)


def _unit(rows: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of length 1, and the norm of their error."""
    length = (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return rows / length, off / length + 4 * FLOAT32


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))


def gates_of_rows(
    layer: StateLayer, index: int, data: StateStepData
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decay [T, Hv, 1 or K], its relative error [T, Hv, 1], and the factor of the stored update [T, Hv, 1]."""
    rows, heads = data.q.shape[1], layer.v_heads
    if layer.slope is not None:
        g = -layer.slope.double().view(1, heads, 1).expand(rows, heads, 1)
        beta = torch.ones(rows, heads, 1, dtype=torch.float64)
    elif layer.k_k is not None:
        g = log_decays(data.k[index].double()).view(rows, heads, layer.k_dim)
        beta = torch.ones(rows, heads, 1, dtype=torch.float64)
    else:
        assert layer.A_log is not None
        assert layer.dt_bias is not None
        rate, wide = layer.A_log.double().exp().view(1, heads, 1), data.k.shape[-1] // heads
        gate = data.k[index].double().reshape(rows, heads, wide) + layer.dt_bias.double().view(1, heads, -1)
        if layer.lower_bound is not None:
            g = layer.lower_bound * torch.sigmoid(rate * gate)
        else:
            g = -rate * _softplus(gate)
        if layer.of_kind.steps:
            beta = _softplus(gate)
        else:
            beta = torch.sigmoid(data.v[index].double()).view(rows, heads, 1)
    off = FLOAT32 * (_IN_EXP + 4 * g.abs())
    # A state that is forgotten has no error left, however large g is.
    off = torch.where(g < -_FORGOTTEN, 0.0, off)
    return g.exp(), off.amax(-1, keepdim=True), beta


_FORGOTTEN = 104.0
"""Value of g beyond which exp(-g) is below the smallest float32 number."""


def convolved(layer: StateLayer, index: int, data: StateStepData) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations after the convolution [T, C] float64, and the limit of each element."""
    rows = data.q[index].double()
    if layer.conv_weight is None or data.passed_on:
        return rows, torch.zeros_like(rows)
    weight, width = layer.conv_weight.double(), layer.conv_width
    out, size, rounded = (torch.zeros_like(rows) for _ in range(3))
    every, read = _taps(rows, start_of(data).windows[index][..., data.history :], data)
    for tap in range(width):
        term = weight[:, tap] * every[read[:, tap]]
        out += term
        size += term.abs_()
        rounded += rounding(term, data.dtype)
    if layer.conv_bias is not None:
        out, size = out + layer.conv_bias.double(), size + layer.conv_bias.double().abs()
    off = FLOAT32 * (width + 4) * size
    if data.conv_products == "model":
        off = off + rounded
    if layer.activation == "silu":
        out, off = out * torch.sigmoid(out), 1.1 * off + 4 * FLOAT32 * out.abs()
    # Servers' convolutions give back the model's dtype.
    return out, off + rounding(out.abs(), data.dtype)


def _taps(rows: torch.Tensor, windows: torch.Tensor, data: StateStepData) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of all requests, [n, C] float64, those of each request after its window, and the input that each tap of
    each row reads, [T, W] int64. ``rows`` [T, C] float64: the rows of the step; ``windows`` [B, C, W - 1].
    """
    width, first = data.shape.conv_width, 0
    inputs, read = [rows[:0]], [torch.empty(0, width, dtype=torch.int64)]
    for request, own in enumerate(torch.split(rows, [*data.news])):
        new = torch.arange(len(own))[:, None] + torch.arange(width)
        if data.trees:
            paths = (
                [*range(width - 1), *(width - 1 + row for row in data.path(request, to + 1))] for to in range(len(own))
            )
            new = torch.tensor([path[-width:] for path in paths])
        inputs += [windows[request].double().T, own]
        read.append(first + new)
        first += width - 1 + len(own)
    return torch.cat(inputs), torch.cat(read)


def _rows(data: StateStepData, request: int, count: int, first: int) -> slice | list[int]:
    """Rows of the batch that lead to the state after ``count`` rows of a request, whose first row is ``first``."""
    if not data.trees:
        return slice(first, first + count)
    return [first + row for row in data.path(request, count)]


def _window_behind(data: StateStepData, request: int, rows: int) -> torch.Tensor:
    """[L, C, W - 1 and ``history``] after this number of rows of a request: copies of its last inputs."""
    before = start_of(data).windows
    inputs = data.q[:, _rows(data, request, rows, sum(data.news[:request]))]
    every = torch.cat([before[:, request], inputs.transpose(1, 2)], -1)
    return every[..., every.shape[-1] - before.shape[-1] :]


def _windows(data: StateStepData) -> torch.Tensor:
    """[L, E, C, columns]: the window of each end, as in memory."""
    before, nodes = start_of(data).windows, data.nodes
    columns = data.shape.window_columns(nodes) + data.history
    found = torch.empty(len(before), len(data.ends), before.shape[2], columns, dtype=before.dtype)
    fill_with_signaling_nan(found)
    starts = np.cumsum([0, *data.news])
    for index, end in enumerate(data.ends):
        if columns and end.has_window:
            # A slot for each node: one window holds the inputs of the window after each node.
            rows = data.news[end.request] if nodes > 1 else end.rows
            inputs = data.q[:, _rows(data, end.request, rows, int(starts[end.request]))]
            every = torch.cat([before[:, end.request], inputs.transpose(1, 2)], -1)
            found[:, index] = every[..., every.shape[-1] - columns :]
    return found


assert math.exp(-_FORGOTTEN) < 1e-45
