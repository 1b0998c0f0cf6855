"""The contract of an attention backend: what a server calls, in which order, and what each call may do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from .batch import ForwardBatch, VerifyMask
from .capabilities import Capabilities, Unsupported
from .index_pool import IndexPool
from .kv_group import KVGroup
from .kv_layouts import KVLayer, KVPoolSpec
from .kv_pool import KVPool
from .layer import AttentionLayer, HeadShape
from .merging import KVSplit
from .modes import ForwardMode
from .server_conventions import Dialect
from .state import State
from .state_pool import StateContext

__all__ = ["AttentionBackend", "BackendContext", "LegacyGraphHooks", "refuse_undeclared"]

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class BackendContext:
    """Everything a server knows when it constructs a backend."""

    device: torch.device
    """Device of all tensors."""
    dtype: torch.dtype
    """Dtype of q, k, v and of the output."""
    kv_pool: KVPool
    """KV pool of all layers, or of the first KV group."""
    req_to_token: torch.Tensor
    """[pool_size + 1, columns] int32: KV *slot* of each token of each request. Row 0 is a reserved dummy, all
    zeros. Page of logical page p of request r: ``req_to_token[r, p * page_size] // page_size``. Entries past a
    request's length are stale slots of others."""
    layers: tuple[AttentionLayer, ...]
    """All layers that will be run. With ``heads_by_layer`` they differ in their heads: a workspace has to fit the
    largest, and each of ``head_shapes`` needs a plan."""
    page_size: int
    """Slots per page."""
    max_context_len: int
    """Most tokens of one request, prefix and new tokens together: columns of ``req_to_token``. If
    ``dialect.context_len`` is ``prefix``, most tokens before a step that has drafts, and ``req_to_token`` has more
    columns."""
    max_bs: int
    """Most requests in one batch, padding included; eager batches may be larger than the largest graph."""
    max_num_tokens: int
    """Most tokens in one batch, padding included."""
    modes: frozenset[ForwardMode]
    """Modes in which this instance will be run."""
    num_draft_tokens: int = 1
    """N: nodes of a draft tree, and rows per request in draft-extend v2."""
    speculative_num_steps: int = 0
    """S: longest path of a draft tree below its root; v1 has at most S + 1 rows per request. Draft-decode: draft tokens
    of a branch, from S - 1 forwards."""
    topk: int = 0
    """K: widest branching of a draft tree; 1 for a chain, 0 without target-verify."""
    index_pool: IndexPool | None = None
    """Index keys of the layers that select keys; None without an indexer."""
    max_extend_tokens: int = 0
    """Most new tokens of one request in extend (a server's ``chunked_prefill_size`` bounds it); 0 without extend."""
    max_encoder_len: int = 0
    """Most encoder keys of one request; 0 without cross-attention layers. Graphs are captured with it."""
    draft_branches: int = 0
    """K of draft-decode: rows per request in each of its forwards; 0 without draft-decode."""
    draft_widths: tuple[int, ...] = ()
    """Widths of the batches if they differ (``ServerConventions.narrower_widths``), ascending: N of target-verify and
    draft-extend v2, S + 1 of draft-extend, S of draft-decode. The fields above have the largest width. Empty: all
    batches have that width."""
    capture_sizes: tuple[int, ...] = ()
    """Batch sizes that graphs are captured for, ascending; if one mode has several, those of all modes. A backend may
    choose kernels by them. Empty if the sizes are not known."""
    capture_tokens: tuple[int, ...] = ()
    """Rows of one forward of those graphs, ascending: ``capture_sizes`` in tokens, for servers that count tokens (as
    vLLM's ``cudagraph_capture_sizes`` do). In extend the requests of a graph share its rows. Empty if the sizes are not
    known."""
    max_spans: int = 0
    """Most bidirectional spans of a request in any batch; 0 if no layer has spans."""
    kv_splits: tuple[KVSplit, ...] = ()
    """KV splits for which each layer calls ``forward_return_lse``, in this order, instead of ``forward``. Empty:
    ``forward`` is called."""
    dialect: Dialect = field(default_factory=Dialect)
    """Conventions of the server, in which servers differ."""
    kv_groups: tuple[KVGroup, ...] = ()
    """Two or more groups if layers do not share KV memory. ``kv_pool`` and ``req_to_token`` belong to the first group,
    which may be the windowed one; ``group_of`` returns the group of a layer. Empty if all layers share KV memory,
    without the capability ``kv_groups``, and with ``kv_splits``."""

    qq_bias: str = "none"
    """``own`` or ``shared``: each batch has ``ForwardBatch.qq_bias``, of each request or the same for all. ``none``: no
    batch has one."""
    state: StateContext | None = None
    """Layers that keep a recurrent state, and the pool of states. None: no layer does."""

    @cached_property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """Different head shapes of the layers, in the order of ``layers``."""
        return tuple(dict.fromkeys(layer.head_shape for layer in self.layers))

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        """``kv_groups``, or a single group of all layers."""
        ids = tuple(layer.layer_id for layer in self.layers)
        return self.kv_groups or (KVGroup(0, ids, self.kv_pool, self.req_to_token),)

    def group_of(self, layer: AttentionLayer) -> KVGroup:
        """Group that has the layer's KV. Raises ``KeyError`` for a layer of another model."""
        for group in self.groups:
            if layer.layer_id in group.layer_ids:
                return group
        raise KeyError(f"no KV group has a layer of id {layer.layer_id}")

    @property
    def causal(self) -> bool:
        """``AttentionLayer.causal`` of all layers but the cross-attention layers."""
        return next((each.causal for each in self.layers if not each.is_cross_attention), True)

    @cached_property
    def sliding_window_size(self) -> int:
        """W of the layers that have a window; -1 if none has one. For backends that plan with one window per model.

        Raises ``ValueError`` if layers have different windows, which only ``Windows(layers="any")`` allows.
        """
        windows = {layer.sliding_window_size for layer in self.layers} - {-1}
        if len(windows) > 1:
            raise ValueError(
                f"layers have windows of {_counted(windows)}, so the context has no single window: use each layer's, "
                "or declare windows=Windows(..., layers='one')"
            )
        return max(windows, default=-1)


def _counted(windows: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(windows)))


def refuse_undeclared(capabilities: Capabilities, context: BackendContext) -> None:
    """Raise ``Unsupported``, naming the first capability that the context exceeds."""
    first = context.layers[0]
    # The softmax layers of a hybrid model follow from its layers that keep a state.
    hybrid = capabilities.state is not None and capabilities.state.hybrid
    own = [layer for layer in context.layers if layer.head_layout.has_state or not hybrid]
    grouped = [layer.q_per_kv for layer in context.layers if layer.head_layout.kv_heads != "as many"]
    dtype = _DTYPE_NAMES.get(context.dtype, str(context.dtype))
    kv_dtype = _kv_dtype(context)
    rows = max([1] + [_rows(mode, context) for mode in context.modes])
    windows = [layer.sliding_window_size for layer in context.layers if layer.sliding_window_size >= 0]
    windowed, narrowest = bool(windows), min(windows, default=capabilities.windows.smallest)
    checks: list[tuple[str, object, bool]] = [
        ("mode", ", ".join(sorted(context.modes - capabilities.eager - capabilities.graph)),
         context.modes <= capabilities.eager | capabilities.graph),
        ("family", *_first_outside((layer.head_layout.name for layer in own), capabilities.families)),
        ("dtype", dtype, dtype in capabilities.dtypes),
        ("KV dtype", kv_dtype, kv_dtype in capabilities.kv_dtypes),
        ("k_scale or v_scale other than 1 over a pool that holds K and V as given,", kv_dtype,
         kv_dtype != "same" or capabilities.server.takes_unused_scales
         or all(layer.k_scale == layer.v_scale == 1.0 for layer in context.layers)),
        ("head dim", *_first_outside((layer.v_head_dim for layer in context.layers), capabilities.head_dims)),
        ("MLA rope dim", first.head_dim - first.kv_lora_rank,
         not first.head_layout.values_in_keys or first.head_dim - first.kv_lora_rank in capabilities.mla_rope_dims),
        ("columns of keys behind those of values,", *_first_outside(
            (layer.head_dim - layer.v_head_dim for layer in own
             if not (layer.head_layout.values_in_keys or layer.head_layout.has_state)),
            capabilities.wider_keys | {0})),
        ("page size", context.page_size, context.page_size in capabilities.page_sizes),
        ("KV layout", context.kv_pool.layout, context.kv_pool.layout in capabilities.kv_layouts),
        ("GQA ratio", *_first_outside(grouped, capabilities.gqa_ratios)),
        ("number of head shapes", len({layer.head_shape for layer in own}),
         capabilities.heads_by_layer or len({layer.head_shape for layer in own}) <= 1),
        ("query rows per request", rows, rows <= capabilities.max_q_rows),
        ("new tokens per request", context.max_extend_tokens,
         context.max_extend_tokens <= capabilities.max_extend_tokens),
        ("topk", context.topk, context.topk <= capabilities.max_topk),
        ("draft branches", context.draft_branches, context.draft_branches <= capabilities.max_draft_branches),
        ("batches of several widths in", ", ".join(sorted(context.modes - capabilities.server.narrower_widths)),
         not context.draft_widths or context.modes <= capabilities.server.narrower_widths),
        ("context length", context.max_context_len, context.max_context_len <= capabilities.max_context_len),
        ("sliding window", ", ".join(sorted(context.modes - capabilities.windows.modes)),
         not windowed or context.modes <= capabilities.windows.modes),
        ("sliding window of size", narrowest, narrowest >= capabilities.windows.smallest),
        ("layers with sliding windows", _counted({layer.sliding_window_size for layer in context.layers}),
         _windows_agree(capabilities, context)),
        ("chunked-local layers in", ", ".join(sorted(context.modes - capabilities.windows.chunked)),
         context.modes <= capabilities.windows.chunked or not any(layer.attention_chunk_size for layer in own)),
        ("bidirectional spans in", ", ".join(sorted(context.modes - capabilities.spans.modes)),
         context.modes <= capabilities.spans.modes or not any(layer.bidirectional_spans for layer in own)),
        ("layers with and layers without bidirectional spans,", len(own),
         capabilities.spans.by_layer or len({layer.bidirectional_spans for layer in own}) <= 1),
        ("ALiBi in", ", ".join(sorted(context.modes - capabilities.alibi)),
         context.modes <= capabilities.alibi or all(layer.alibi_slopes is None for layer in context.layers)),
        ("an additive bias in", ", ".join(sorted(context.modes - capabilities.qq_bias)),
         context.qq_bias == "none" or context.modes <= capabilities.qq_bias),
        ("an additive bias for each request:", context.qq_bias,
         context.qq_bias != "own" or not capabilities.shared_qq_bias),
        ("cross-attention layers in", ", ".join(sorted(context.modes - capabilities.cross_attention.modes)),
         context.modes <= capabilities.cross_attention.modes or not any(each.is_cross_attention for each in own)),
        ("encoder keys in slots", _encoder_slots(context),
         _encoder_slots(context) in capabilities.cross_attention.encoder_slots | {"none"}),
        ("layers that are not causal in", ", ".join(sorted(context.modes - capabilities.non_causal)),
         context.causal or context.modes <= capabilities.non_causal),
        ("a window of layers that are not causal,", narrowest, context.causal or not windowed),
        ("sliding window in trees", context.topk, not windowed or context.topk <= 1 or capabilities.windows.in_trees),
        ("scaling", ", ".join(f"{layer.scaling:.4g}" for layer in context.layers),
         capabilities.any_scaling
         or all(layer.has_usual_scaling or not layer.head_layout.usual_scaling for layer in context.layers)),
        ("soft cap", max(layer.logit_cap for layer in context.layers),
         capabilities.logit_cap or not any(layer.logit_cap for layer in context.layers)),
        ("log-sum-exp of", ", ".join(map(str, context.kv_splits)), _takes_splits(capabilities, context)),
        ("selected keys per row", ", ".join(str(layer.topk) for layer in context.layers),
         all(layer.topk in (capabilities.sparse.topk if capabilities.sparse else {0}) for layer in context.layers)),
        ("indexer with heads and reuse of", ", ".join(f"{each.index_heads}" for each in context.layers),
         _selects(capabilities, context)),
        ("sinks", "given", capabilities.sinks or all(layer.sinks is None for layer in context.layers)),
        *_of_states(capabilities, context),
        *((name, said, said in getattr(capabilities.server, name)) for name, said in vars(context.dialect).items()),
        ("number of KV groups", len(context.groups), capabilities.kv_groups or len(context.groups) == 1),
    ]  # fmt: skip
    for what, value, fine in checks:
        if not fine:
            raise Unsupported(f"{what} {value} is not declared")


def _encoder_slots(context: BackendContext) -> str:
    """One of ``ENCODER_SLOTS``; ``none`` without cross-attention layers."""
    if not any(layer.is_cross_attention for layer in context.layers):
        return "none"
    return "own_group" if context.kv_groups else "first"


def _kv_dtype(context: BackendContext) -> str:
    pool = context.kv_pool
    if pool.dtype == context.dtype:
        return "same"
    return "fp8_e4m3" if pool.dtype == torch.float8_e4m3fn else pool.row_format or str(pool.dtype)


def _of_states(capabilities: Capabilities, context: BackendContext) -> list[tuple[str, object, bool]]:
    state, declared = context.state, capabilities.state
    if state is None or declared is None:
        return [("layers that keep a state,", state is not None, state is None and declared is None)]
    dtype = _DTYPE_NAMES.get(state.pool.dtype, str(state.pool.dtype))
    verifies = ForwardMode.TARGET_VERIFY in context.modes
    return [
        ("width of a key", *_first_outside((layer.k_dim for layer in state.layers), declared.k_dims)),
        ("state dtype", dtype, dtype in declared.dtypes),
        ("convolution of width", *_first_outside((each.conv_width for each in state.layers), declared.conv_widths)),
        ("order of a state", state.pool.order, state.pool.order in declared.orders),
        ("strided states", state.pool.strided, declared.strided or not state.pool.strided),
        ("padded states", state.padding, state.padding in declared.padding),
        ("fresh states", state.fresh, state.fresh in declared.fresh),
        ("trees of drafts in layers of kind", *_without_trees(state, declared, context.topk if verifies else 1)),
        ("rollback of states by", state.rollback, state.rollback in declared.rollback or not verifies),
        ("snapshots of states each", state.snapshots, state.snapshots in declared.snapshots | {0}),
        ("states of a prefix cache by", state.continues, state.continues in declared.continues),
    ]


def _without_trees(state: StateContext, declared: State, topk: int) -> tuple[object, bool]:
    """The first kind of layers whose drafts may not branch, though those of the context do; True if there is none."""
    kinds = (layer.kind for layer in state.layers) if topk > 1 else ()
    return _first_outside(kinds, declared.trees if state.rollback == "commit" else frozenset())


def _selects(capabilities: Capabilities, context: BackendContext) -> bool:
    indexer = capabilities.sparse.indexer if capabilities.sparse else None
    if indexer is None:
        return not any(layer.index_heads or layer.reuses_selection for layer in context.layers)
    heads = indexer.heads if indexer.fused else indexer.heads | {0}
    reused = indexer.reuses_selections or not any(layer.reuses_selection for layer in context.layers)
    scale = context.index_pool is None or context.index_pool.scale == indexer.scale
    return reused and scale and all(layer.index_heads in heads for layer in context.layers)


def _windows_agree(capabilities: Capabilities, context: BackendContext) -> bool:
    every = {layer.sliding_window_size for layer in context.layers}
    return {"any": True, "one": len(every - {-1}) <= 1, "same": len(every) == 1}[capabilities.windows.layers]


def _first_outside(values: Iterable[Any], supported: Set[Any]) -> tuple[object, bool]:
    """The first of ``values`` that is not declared, and True if there is none."""
    found = next((value for value in values if value not in supported), None)
    return found, found is None


def _rows(mode: ForwardMode, context: BackendContext) -> int:
    if not mode.is_speculative():
        return 1
    return context.speculative_num_steps + 1 if mode is ForwardMode.DRAFT_EXTEND else context.num_draft_tokens


def _takes_splits(capabilities: Capabilities, context: BackendContext) -> bool:
    def takes(part: KVSplit) -> bool:
        lse = capabilities.lse
        if lse is None:
            return False
        if part.kind == "rank":
            by_token = lse.tokens if part.interleave == 1 else frozenset()
            by_page = lse.pages if part.interleave == context.page_size else frozenset()
            return context.modes <= by_token | by_page
        return context.modes <= (lse.whole if part.kind == "whole" else lse.prefix)

    return all(map(takes, context.kv_splits))


RESERVED_PREFIX = "_kit_"
"""Prefix of every private name of a base class that authors derive from; all other names are free."""


def _refuse_hidden_names(cls: type) -> None:
    """Raise ``TypeError`` if a class outside the kit has a name of the kit's own bases."""
    if cls.__module__.startswith(f"{_CONTRACT}."):
        return
    for name in vars(cls):
        if name == "context" or name.startswith(RESERVED_PREFIX):
            bases = (each for each in cls.__mro__[1:] if each.__module__.startswith(f"{_CONTRACT}."))
            base = next(bases, AttentionBackend)
            kept = "the BackendContext of an instance" if name == "context" else "what it knows of a step"
            raise TypeError(
                f"{cls.__name__}.{name} hides a name under which {base.__name__} keeps {kept}: give it another name "
                f"(any that is not 'context' and does not begin with {RESERVED_PREFIX!r})"
            )


_CONTRACT = __name__.rpartition(".")[0]


class AttentionBackend(ABC):
    """One attention backend, as a server runs it.

    Eager: ``init_forward_metadata(batch)``, then ``forward`` once per layer.

    Graph: ``init_cuda_graph_state`` once; then for each bucket, largest first,
    ``init_forward_metadata_out_graph(batch, in_capture=True)``, warm-ups and the capture, each of which runs
    ``init_forward_metadata_in_graph`` and every layer's ``forward``; ``init_forward_metadata_before_capture``, which
    is optional, runs between the warm-ups and the capture. At a replay only ``init_forward_metadata_out_graph(view)``
    runs; then the graph does.

    Draft-decode: the same, with several forwards for one plan, and all of them in one graph. The hooks above plan the
    draft and are given the batch of its first forward. Each later forward has its own batch, numbered by
    ``spec_info.step``, and begins with ``init_forward_metadata_in_graph`` of that batch, in eager mode too. A server's
    multi-step backend plans all steps beforehand and selects one by ``step``. A backend that plans one step at a time
    does it there.

    ==================================== ============================================================================
    hook                                 may do
    ==================================== ============================================================================
    constructor                          allocate workspaces; refuse undeclared contexts
    ``init_cuda_graph_state``            allocate every persistent graph buffer at its largest size, once
    ``init_forward_metadata_out_graph``  host work, plans, writes *into* persistent buffers; at capture also create
                                         the objects of this bucket; at replay never replace a tensor the graph reads
    ``init_forward_metadata_in_graph``   device work only: no ``.item()``, no copies to or from the host, no shapes
                                         that depend on data, no persistent tensors allocated here
    ``forward``                          the same, when it runs under capture
    ==================================== ============================================================================
    """

    capabilities: ClassVar[Capabilities]
    """Capabilities that this class declares. The kit reads them without constructing the backend."""

    kernels: str = "real"
    """``"real"``, ``"emulated"`` when the numbers come from a torch fake of a vendor kernel, or ``"stores"`` when the
    kernels that attend are real and torch stores new keys and values instead of a compiled operator. Reports show
    it."""

    notes: ClassVar[tuple[str, ...]] = ()
    """Facts about the class on this machine that a reader of results must know, such as missing compiled modules. The
    header of a run shows them."""

    not_here: ClassVar[str] = ""
    """Reason why the class cannot run on this machine, if ``capabilities.requires`` cannot express it, such as a
    compiled module that does not load. Its modes are reported as not run here."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Raise ``TypeError`` for a subclass that hides a name that its base keeps for itself."""
        super().__init_subclass__(**more)
        _refuse_hidden_names(cls)

    def __init__(self, context: BackendContext) -> None:
        """Keep ``context`` and raise ``Unsupported`` if it is outside ``capabilities``."""
        refuse_undeclared(self.capabilities, context)
        self.context = context

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """Allocate the KV pool, for backends that declare the KV layout ``custom``. Returns one ``KVLayer`` per layer.

        The kit stores and reads rows by these views, and fills and compares all memory that they lie in.
        Called before the constructor, whose ``context.kv_pool`` holds the result.
        """
        raise NotImplementedError(f"{cls.__name__} declares kv_layouts={{'custom'}}: it has to have lay_out_kv_pool")

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Write k and v to ``batch.out_cache_loc``, attend, return the output.

        ``q`` [T, Hq, D], ``k`` [T, Hk, D], ``v`` [T, Hk, Dv], in the model's dtype, possibly strided views of one
        packed tensor; none may be modified. The heads of a row are contiguous, except those of ``k`` and ``v`` if
        ``takes_strided_heads`` is declared. Hq, Hk, D and Dv are ``layer``'s own. For MLA ``q`` is [T, H,
        kv_lora_rank + rope] (absorbed), ``k`` [T, 1, same] the latent row to store, and ``v`` its first part. With
        ``save_kv_cache`` False the pool holds the new keys and values already (a fused kernel stored them, or the layer
        shares another's): k and v may hold anything, and must be neither read nor stored. Servers then give None for
        both, and so does the kit if the backend declares ``takes_none_kv``.
        Returns [T, Hq, Dv] (or [T, Hq * Dv]) in the model's dtype. The tensor stays valid until the next ``forward``,
        or longer: see ``output_lifetime``. With ``takes_out`` there is one more argument, ``out=None``; if it is given,
        ``forward`` writes to it and returns it.
        In a cross-attention layer k and v are those of E encoder tokens, to store in ``batch.encoder_out_cache_loc``,
        or None if the step stores none (``CrossAttention``).
        With ``sparse`` there is ``selected``, [T, topk] int32, by name: the keys of each row (``Sparse``). Only they
        are attended and may be read; every other key of the request may hold NaN.
        Rows of padded requests may hold anything, NaN included: those of the output, and those of ``q``, ``k`` and
        ``v``. A tile of live rows must not load them, because 0 times NaN is NaN (sglang #15757).
        """

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        part: KVSplit,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend like ``forward`` over only the keys of the KV split ``part``. Returns output and log-sum-exp. With
        ``sparse`` there is ``selected`` by name, and ``part`` is the whole.

        Called if ``capabilities.lse`` is declared. ``part`` is one of ``context.kv_splits``, known to the constructor
        and so to every plan. The first split of a layer stores new keys and values; the others have ``save_kv_cache``
        False.
        The output is [T, Hq, Dv] in the model's dtype, normalized by the split's own sum. The log-sum-exp is [T, Hq] or
        [Hq, T], as declared: the logarithm, in the declared base, of the sum of exp(logit) over the keys of the split
        that the row may see; logits as in the softmax, scaled and capped. If ``part.sinks``, the sink is one of them.
        A row that sees no key of the split has -inf, or its sink, and an output of zeros or other finite numbers: a
        merge gives it the weight 0, and 0 * NaN is NaN. Both are read before the next call.
        """
        raise NotImplementedError(f"{type(self).__name__} declares lse and has no forward_return_lse")

    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Quantize index keys ``k_index`` [T, 128] (model's dtype), and store them in ``context.index_pool`` in the
        slots ``batch.out_cache_loc``.

        Called before ``select``, if ``capabilities.sparse.indexer`` is declared, and not if the pool holds the step's
        keys already. Nothing else in the pool may change. May run under capture: device work only.
        """
        raise NotImplementedError(f"{type(self).__name__} declares an indexer and has no store_index")

    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Select the keys of each row: [T, topk] int32 on the device, in any order, -1 where there is none.

        ``q_index`` [T, heads, 128] in FP8 e4m3; ``weights`` [T, heads] float32, which include the scale of ``q_index``.
        The score of key s for row t is the sum over heads h of ``weights[t, h] * relu(q_index[t, h] . k[s])``, times
        the scale of key s. A row selects the min(topk, keys that it may see) keys of the highest scores, its own
        included. Rows of padded requests may hold anything. An index is what ``Sparse.index_space`` says.

        Called before each ``forward``, whose ``selected`` is mostly this result. May run under capture.
        """
        raise NotImplementedError(f"{type(self).__name__} declares an indexer and has no select")

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the results of two KV splits from ``forward_return_lse``. Called if ``lse.merges`` is declared.

        ``out_a``, ``out_b`` [T, Hq, Dv] in the model's dtype, ``lse_a``, ``lse_b`` in the declared base, layout and
        dtype. Returns output and log-sum-exp of the two splits together, in the same form. One split may be empty, or
        both. May run under capture: device work only.
        """
        raise NotImplementedError(f"{type(self).__name__} declares lse with merges=True and has no merge_state")

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare one eager step."""
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:  # noqa: B027 - optional hook
        """Allocate every buffer that captured graphs will read, once, before any capture."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:  # noqa: B027
        """Prepare a capture (``in_capture``) or a replay, outside the graph.

        At a replay ``batch`` is a view: ``ForwardBatch`` lists its attributes and their lengths.
        """

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:  # noqa: B027 - optional hook
        """Build metadata a second time, between the last warm-up and the capture of a bucket, outside the graph.

        For backends whose servers build metadata twice (vLLM). ``batch`` is that of ``init_forward_metadata_out_graph``
        at this capture. The capture must read the buffers that replays fill.
        """

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:  # noqa: B027 - optional hook
        """Device work at the start of the captured region, which every replay executes again."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """``seq_lens`` of a padded request, and of every request while capturing (extend: of those without rows).

        0 or 1. Not called if padded requests have neither rows nor keys (``Dialect.padded_requests``): then it is 0.
        """
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """A mask buffer for the draft stage to fill in place. None: a fresh FULL_MASK is made for each step."""
        return None


class LegacyGraphHooks:
    """A mix-in for backends with the older pair of graph hooks; list it *before* ``AttentionBackend``. It does not
    support graphs of extend, whose lengths these hooks never had.

    Implement ``init_forward_metadata_capture_cuda_graph`` and ``init_forward_metadata_replay_cuda_graph`` as servers up
    to mid-2026 called them (both outside the graph, nothing inside), and ``init_forward_metadata`` for eager steps.
    """

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: Any,
    ) -> None:
        """Prepare a capture. Tensors have exactly ``bs`` rows.

        ``req_pool_indices`` and ``seq_lens`` [bs] int64, on the device; ``encoder_lens`` is None.
        """
        raise NotImplementedError("a backend with LegacyGraphHooks implements init_forward_metadata_capture_cuda_graph")

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int | None,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """Prepare a replay. Tensors may be longer than ``bs``: slice them.

        Dtypes are those of a capture; ``seq_lens_cpu`` is int64 on the host. It is None, like ``seq_lens_sum``, if the
        backend declares that it needs no CPU lengths.
        """
        raise NotImplementedError("a backend with LegacyGraphHooks implements init_forward_metadata_replay_cuda_graph")

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Translate the call into the older pair."""
        if in_capture:
            self.init_forward_metadata_capture_cuda_graph(
                batch.batch_size, batch.input_ids.shape[0], batch.req_pool_indices, batch.seq_lens, None,
                batch.forward_mode, batch.spec_info,
            )  # fmt: skip
        else:
            self.init_forward_metadata_replay_cuda_graph(
                batch.batch_size, batch.req_pool_indices, batch.seq_lens, batch.seq_lens_sum, None,
                batch.forward_mode, batch.spec_info, batch.seq_lens_cpu,
            )  # fmt: skip
