"""The contract of an attention backend: what a server calls, in which order, and what each call may do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .batch import ForwardBatch, VerifyMask
from .capabilities import Capabilities, Unsupported
from .context import BackendContext
from .hand_over import HandOver
from .kv_layouts import KVLayer, KVPoolSpec
from .kv_split import KVSplit
from .layer import AttentionLayer
from .modes import ForwardMode
from .offloading import Transfer

__all__ = ["AttentionBackend", "LegacyGraphHooks", "refuse_undeclared"]


def refuse_undeclared(capabilities: Capabilities, context: BackendContext) -> None:
    """Raise ``Unsupported``, naming the first capability that the context exceeds."""
    for what, value in capabilities.refused(context):
        raise Unsupported(f"{what} {value} is not declared")


RESERVED_PREFIX = "_kit_"
"""Prefix of every private name of a base class that authors derive from; all other names are free."""


def _refuse_hidden_names(cls: type) -> None:
    """Raise ``TypeError`` if a class outside the kit defines a private name of the kit's base classes."""
    if cls.__module__.startswith(f"{_CONTRACT}."):
        return
    for name in vars(cls):
        if name == "context" or name.startswith(RESERVED_PREFIX):
            bases = (each for each in cls.__mro__[1:] if each.__module__.startswith(f"{_CONTRACT}."))
            base = next(bases, AttentionBackend)
            kept = "the BackendContext of an instance" if name == "context" else "its state of a step"
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

    In draft-decode one plan serves several forwards, and one graph holds all of them. The hooks above plan the draft
    and are given the batch of its first forward. Each later forward has its own batch, numbered by
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
        """Raise ``TypeError`` for a subclass that defines a name which its base class reserves."""
        super().__init_subclass__(**more)
        _refuse_hidden_names(cls)

    def __init__(self, context: BackendContext) -> None:
        """Keep ``context`` and raise ``Unsupported`` if it is outside ``capabilities``."""
        refuse_undeclared(self.capabilities, context)
        self.context = context

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """Allocate the KV pool, for backends that declare the KV layout ``custom``. Returns one ``KVLayer`` per layer.

        The kit stores and reads rows through these views, and fills and compares all memory that the views point into.
        Called before the constructor, whose ``context.kv_pool`` holds the result.
        """
        raise NotImplementedError(f"{cls.__name__} declares kv_layouts={{'custom'}}, so it must define lay_out_kv_pool")

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
        ``forward`` writes to it and returns it. In a cross-attention layer k and v belong to E encoder tokens and are
        stored in ``batch.encoder_out_cache_loc``; they are None if the step stores none (``CrossAttention``). With
        ``sparse`` the keyword argument ``selected``, [T, topk] int32, lists the keys of each row (``Sparse``). Only
        these are attended to and may be read; every other key of the request may hold NaN. Rows of padded requests may
        hold anything, NaN included, in ``q``, ``k`` and ``v`` and in the output. A tile of live rows must not load
        them, because 0 times NaN is NaN (sglang #15757).
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
        ``sparse`` the keyword argument ``selected`` is given, and ``part`` is the split ``whole``.

        Called if ``capabilities.lse`` is declared. ``part`` is one of ``context.kv_splits``, known to the constructor
        and so to every plan. The first split of a layer stores new keys and values; the others have ``save_kv_cache``
        False. The output is [T, Hq, Dv] in the model's dtype, normalized by the split's own sum. The log-sum-exp is [T,
        Hq] or [Hq, T], as declared: the logarithm, in the declared base, of the sum of exp(logit) over the keys of the
        split that the row may see; logits as in the softmax, scaled and capped. If ``part.sinks``, the sink is one of
        them. The log-sum-exp of a row that sees no key of the split is -inf, or its sink, and its output is zeros or
        other finite values: a merge gives it the weight 0, and 0 * NaN is NaN. Both are read before the next call.
        """
        raise NotImplementedError(f"{type(self).__name__} declares lse but does not define forward_return_lse")

    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Quantize index keys ``k_index`` [T, 128] (model's dtype), and store them in ``context.index_pool`` in the
        slots ``batch.out_cache_loc``. With ``Indexer.rotates`` they are rotated first.

        Called before ``select``, if ``capabilities.sparse.indexer`` is declared, and not if the pool holds the step's
        keys already. Nothing else in the pool may change. May run under capture: device work only.
        """
        raise NotImplementedError(f"{type(self).__name__} declares an indexer but does not define store_index")

    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Select the keys of each row: [T, topk] int32 on the device, in any order, -1 where there is none.

        ``q_index`` [T, heads, 128] in FP8 e4m3; ``weights`` [T, heads] float32, which include the scale of ``q_index``.
        With ``Indexer.rotates`` it has the model's dtype, and the weights do not include its scale.
        The score of key s for row t is the sum over heads h of ``weights[t, h] * relu(q_index[t, h] . k[s])``, times
        the scale of key s. A row selects the min(topk, keys that it may see) keys with the highest scores; its own key
        may be one of them. Rows of padded requests may hold anything. An index is what ``Sparse.index_space`` says.

        Called before each ``forward``, which usually gets this result as ``selected``, but not before one that gets the
        result of another layer (``reuses_selection``) or of a draft's first forward (``Indexer.drafts``). May run under
        capture.
        """
        raise NotImplementedError(f"{type(self).__name__} declares an indexer but does not define select")

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the results of two KV splits from ``forward_return_lse``. Called if ``lse.merges`` is declared.

        ``out_a``, ``out_b`` [T, Hq, Dv] in the model's dtype, ``lse_a``, ``lse_b`` in the declared base, layout and
        dtype. Returns output and log-sum-exp of the two splits together, in the same form. One split may be empty, or
        both. May run under capture: device work only. Of ranks with their own pools each but the last merges its own
        result, a, with that of all ranks after it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares lse with merges=True but does not define merge_state"
        )

    def receive(self, handed: HandOver) -> None:
        """Copy the memory of requests from another instance into this one's pools: K and V, index keys, states.

        Called if ``capabilities.receives`` is declared, before the plan of the step in which the requests occur, and
        never under capture. Every byte is copied as it is, in each layer: the heads of this rank, wherever the sender's
        ranks have them, from the sender's pages into this instance's. Of the receiver's memory only the slots of
        ``HandedRequest`` and page 0 may change, and nothing of the sender's.
        """
        raise NotImplementedError(f"{type(self).__name__} declares receives but does not define receive")

    def offload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Copy rows of device slots to the host slots of a transfer, in every layer. Bytes are copied as they are.

        Called if ``capabilities.offloads`` is declared, never under capture, and also while a graph is in flight: rows
        that work on the current stream stores before the call are copied. Returns an event after the last copy, for
        which the server waits before it uses the device slots for other requests or reads the host slots; None if the
        copies are done, or on the current stream.
        """
        raise NotImplementedError(f"{type(self).__name__} declares offloads but does not define offload")

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Copy rows of host slots to the device slots of a transfer: any slots, for any of the pages that left.

        Work on the current stream before the call may still read or write the slots, so copies come after it. Returns
        an event, as ``offload`` does. With ``Offloads.by_layer`` the server does not wait for it: the rows of a layer
        are back before its ``forward`` stores or reads rows, and all before a plan for a replay returns. Nothing
        reads the host's memory after the event: the server uses it again.
        """
        raise NotImplementedError(f"{type(self).__name__} declares offloads but does not define reload")

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

        For backends whose servers build metadata twice (vLLM). ``batch`` is the one that
        ``init_forward_metadata_out_graph`` gets at this capture. The capture must read the buffers that replays fill.
        """

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:  # noqa: B027 - optional hook
        """Device work at the start of the captured region, which every replay executes again."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return ``seq_lens`` of a padded request, and of every request while a graph is captured (in extend: of
        requests without rows). 0 or 1. Not called if padded requests have neither rows nor keys
        (``Dialect.padded_requests``): then it is 0.
        """
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """A mask buffer that the draft stage fills in place. None: a fresh FULL_MASK is allocated for each step."""
        return None


class LegacyGraphHooks:
    """A mix-in for backends that implement the two older graph hooks; list it *before* ``AttentionBackend``. It does
    not support graphs of extend, whose lengths these hooks never had.

    Implement ``init_forward_metadata_capture_cuda_graph`` and ``init_forward_metadata_replay_cuda_graph`` as servers up
    to mid-2026 called them (both outside the graph, and nothing inside it), and ``init_forward_metadata`` for eager
    steps.
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

        Dtypes are the same as at a capture; ``seq_lens_cpu`` is int64 on the host. It is None, like ``seq_lens_sum``,
        if the backend declares that it needs no CPU lengths.
        """
        raise NotImplementedError("a backend with LegacyGraphHooks implements init_forward_metadata_replay_cuda_graph")

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Translate the call into one of the older two hooks."""
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
