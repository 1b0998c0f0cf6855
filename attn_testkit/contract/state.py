"""Recurrent states that a backend supports: kinds of layers, sizes, dtypes, and the conventions of the server."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared, is_whole, spelled
from .modes import ForwardMode
from .refusal import Refusal, first_outside, name_of_dtype
from .state_kind import STATE_KINDS
from .state_pool import StateContext

__all__ = [
    "CONTINUES",
    "CONV_WINDOWS",
    "FRESH",
    "ORDERS",
    "PADDED_STATES",
    "PRODUCTS",
    "ROLLBACKS",
    "ROUNDINGS",
    "STATE_DTYPES",
    "State",
]  # fmt: skip

STATE_DTYPES = ("fp32", "bf16", "fp16")
PADDED_STATES = ("skip_minus_one", "skip_zero", "write_zero")
FRESH = ("flag", "zeroed")
ORDERS = ("vk", "kv")
SLOTS_IN_DECODE = "slots_in_decode"
SLOTS_MOVED = "slots_moved"
ROLLBACKS = ("commit", "slots", SLOTS_IN_DECODE, SLOTS_MOVED)
CONTINUES = ("copy", "source")
ROUNDINGS = ("nearest", "stochastic")
CONV_WINDOWS = ("exact", "taps_first", "newest_last")
PRODUCTS = ("fp32", "tf32", "model")


@dataclass(frozen=True)
class State(Declared):
    """The recurrent states that a backend supports: ``Capabilities(state=State(k_dims={128}, dtypes={"fp32"}))``.

    The kinds of layers are ``HeadShapes.families`` (names of ``STATE_KINDS``), the numbers of value heads per key head
    ``gqa_ratios``, and the widths of a value ``head_dims``.

    Raises ``ValueError`` for a wrong spelling, and for sets that are empty.
    """

    k_dims: Set[int] = frozenset({128})
    """Widths of a key: K of a state [V, K]. Layers of kind ``conv`` have none, and K is 0."""
    dtypes: Set[str] = frozenset({"fp32"})
    """Dtypes of the recurrent state: ``fp32``, ``bf16``, ``fp16``. The convolution's window has the model's dtype."""
    conv_widths: Set[int] = frozenset({4})
    """Taps W of the convolution; 1: none, as Lightning has it. The window of a slot has W - 1 columns."""
    conv_windows: Set[str] = frozenset({"exact"})
    """Windows of a slot in the pool. ``exact``: W - 1 columns. The others have more columns, of any number, in decode
    and extend. ``taps_first``: the last inputs are in the first W - 1 columns, and the columns after them, room for a
    draft, are neither read nor written (``causal_conv1d_fn`` and ``causal_conv1d_update`` of vLLM and SGLang in Triton:
    ``state_len = width - 1``). ``newest_last``: all columns are inputs, and the newest is in the last one. The taps
    read the last W - 1, and the window moves as a whole (``causal_conv1d_update`` of Dao-AILab; Mamba of state-spaces
    and FLA's ``ShortConvolution`` have W columns). ``StateContext.conv_windows`` names that of an instance."""
    orders: Set[str] = frozenset({"vk"})
    """Order of a state in memory: ``vk`` for [Hv, V, K], ``kv`` for [Hv, K, V]."""
    padding: Set[str] = frozenset({"skip_minus_one"})
    """Meaning of the index of a padded request. ``skip_minus_one``: it is -1, and nothing is read or written (SGLang's
    graphs). ``skip_zero``: it is 0, likewise (the null block of vLLM). ``write_zero``: it is 0, and slot 0 may be
    written (SGLang's eager batches). The kit runs each."""
    fresh: Set[str] = frozenset({"flag"})
    """Ways in which a fresh request begins from zeros. ``flag``: by ``has_initial_state``, and its slot holds the state
    of an earlier owner (NaN here). ``zeroed``: the server has filled the slot with zeros."""
    rollback: Set[str] = frozenset({"commit"})
    """Ways in which target-verify takes back rejected nodes. ``commit``: the backend keeps window and state after
    each node in ``pool.scratch``, and ``StateBackend.commit`` makes one of them the slot's (SGLang). ``slots``: a
    request has a slot for each node, and the next step reads that of the last accepted one (vLLM).
    ``slots_in_decode``: the same, and a decode without a draft, which may follow a verify, gets the list of slots and
    ``num_accepted``, too (Mamba2 of vLLM: ``mamba_attn.py``). ``slots_moved``: a slot for each node, and
    ``StateBackend.commit`` moves the state of the last accepted one to the first slot, and the window within its own
    memory (``postprocess_mamba`` of vLLM with ``mamba_cache_mode="align"``)."""
    snapshots: Set[int] = frozenset()
    """Lengths of a chunk, at whose ends states are copied to another slot for a prefix cache (``Snapshot``); empty:
    never. With rollback ``commit`` only."""
    continues: Set[str] = frozenset({"copy"})
    """Ways in which a request continues a state in a slot of the prefix cache. Several requests may continue one state,
    and its slot does not change. ``copy``: the server has copied window and state to the request's own slot before the
    step (SGLang), and the backend is not involved. ``source``: the backend reads both from
    ``StateInput.sources[i]`` and stores them in ``indices[i]``, in decode and extend (FlashInfer's
    ``initial_state_indices`` and ``output_state_indices``; Mamba2 of vLLM with prefix caching)."""
    trees: Set[str] = frozenset()
    """Kinds of layers whose drafts may branch in target-verify: a node continues the state of its parent, and its
    convolution the inputs of its ancestors. Empty: drafts are chains. With rollback ``commit`` only, and with
    ``max_topk`` above 1."""
    strided: bool = False
    """May the layers of a slot be stored in one block, so that slots are strided (``StatePool``)? Default: each layer
    is contiguous."""
    rounding: Set[str] = frozenset({"nearest"})
    """Roundings of a 16-bit state that a decode stores. ``nearest``: to the nearest number. ``stochastic``: to the
    number above or below, with probabilities by distance, with new random numbers for each element and step
    (``--enable-mamba-cache-stochastic-rounding`` of SGLang and vLLM, ``rand_seed`` of FlashInfer's
    ``selective_state_update``). Outputs are read before the rounding. Prompts and drafts round to the nearest number,
    as chunked kernels do. ``StateContext.rounding`` has the one of an instance."""
    products: str = "fp32"
    """Format to which a kernel rounds the factors of its matrix products: ``fp32``, ``tf32``, or ``model`` for the
    model's dtype, as chunked kernels of prefill do. The limits follow from it, in extend only: kernels that process one
    token at a time multiply in float32."""

    conv_products: str = "fp32"
    """Format to which the convolution rounds each product of a tap and an input before it adds them: ``fp32``, or
    ``model``, as a Triton kernel does when it multiplies two bf16 tensors (``causal_conv1d_update`` of SGLang and
    vLLM). The limits follow from it, in every mode."""

    plain_convolution: bool = True
    """May a convolution have no activation? False: it always ends with ``silu``, which excludes exact data."""
    hybrid: bool = False
    """Does the backend run a model with softmax layers between those that keep a state? Every case has both then, a
    ``forward`` of a softmax layer is given q, k and v, and the KV pool has those layers."""

    def _check(self) -> None:
        for name, known in (
            ("dtypes", STATE_DTYPES), ("orders", ORDERS), ("padding", PADDED_STATES), ("fresh", FRESH),
            ("rollback", ROLLBACKS), ("continues", CONTINUES), ("rounding", ROUNDINGS), ("conv_windows", CONV_WINDOWS),
        ):  # fmt: skip
            self._check_words(name, known)
            if not getattr(self, name):
                raise ValueError(f"State.{name} is empty; write one or more of {', '.join(known)}")
        if "nearest" not in self.rounding:
            raise ValueError("State.rounding must have 'nearest', too: prompts and drafts round states so")
        self._check_words("trees", tuple(STATE_KINDS))
        for name in ("k_dims", "conv_widths", "snapshots"):
            values = self._listed(name)
            if not (values or name == "snapshots") or not all(is_whole(each) and each >= 1 for each in values):
                raise ValueError(
                    f"State.{name} must be one or more whole numbers from 1 on, got {sorted(map(str, values))}"
                )
            self._set(name, frozenset(values))
        spelled("products", self.products, PRODUCTS)
        spelled("conv_products", self.conv_products, ("fp32", "model"))
        self._check_flags()


def refused_states(declared: State | None, context: BackendContext) -> Iterator[Refusal]:
    """Layers of a context that keep a state, and conventions of it, that are not declared."""
    if context.state is None or declared is None:
        if context.state is not None or declared is not None:
            yield "layers that keep a state,", context.state is not None
    else:
        yield from _refused(declared, context, context.state)


def _refused(declared: State, context: BackendContext, state: StateContext) -> Iterator[Refusal]:
    layers, verifies = state.layers, ForwardMode.TARGET_VERIFY in context.modes
    if not declared.hybrid and not all(layer.head_layout.has_state for layer in context.layers):
        yield "softmax layers next to layers that keep a state,", True
    widths = (layer.k_dim for layer in layers if layer.of_kind.recurs)
    yield from first_outside("width of a key", widths, declared.k_dims)
    yield from first_outside("state dtype", [name_of_dtype(state.pool.dtype)], declared.dtypes)
    yield from first_outside("convolution of width", (layer.conv_width for layer in layers), declared.conv_widths)
    if any(layer.conv_width > 1 for layer in layers):
        yield from first_outside("windows of a convolution,", [state.conv_windows], declared.conv_windows)
    yield from first_outside("order of a state", [state.pool.order], declared.orders)
    if state.pool.strided and not declared.strided:
        yield "strided states", True
    yield from first_outside("padded states", [state.padding], declared.padding)
    yield from first_outside("rounding of states", [state.rounding], declared.rounding)
    yield from first_outside("fresh states", [state.fresh], declared.fresh)
    if verifies and context.topk > 1:
        trees = declared.trees if state.rollback == "commit" else frozenset()
        yield from first_outside("trees of drafts in layers of kind", (layer.kind for layer in layers), trees)
    if verifies:
        yield from first_outside("rollback of states by", [state.rollback], declared.rollback)
    yield from first_outside("snapshots of states each", [state.snapshots], declared.snapshots | {0})
    yield from first_outside("states of a prefix cache by", [state.continues], declared.continues)
