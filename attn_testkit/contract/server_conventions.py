"""Conventions in which servers differ: those that a backend supports, and those of its server.

``SGLANG`` and ``VLLM`` describe how SGLang 0.5.23 and vLLM 0.33.0 treat their backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from .context import BackendContext
from .declared import Declared, is_whole, spelled
from .dialect import DIALECTS
from .modes import ForwardMode
from .refusal import Refusal, kv_dtype_of, modes_outside

__all__ = ["SERVERS", "SGLANG", "VLLM", "ServerConventions"]

_DRAFTS = frozenset(ForwardMode) - {ForwardMode.DECODE, ForwardMode.EXTEND}
OUTPUT_LIFETIMES = ("model", "layer")


@dataclass(frozen=True)
class ServerConventions(Declared):
    """The conventions of servers that a backend supports: ``Capabilities(server=ServerConventions(takes_out=True))``.

    Each further value of a set, and True, is a convention that the kit tries too. The defaults are what all servers do,
    or what SGLang does if they differ; the last three fields are wide by default. ``SGLANG`` and ``VLLM`` describe one
    server each, and ``VLLM.with_changes(takes_none_kv=True)`` adds a convention.
    """

    padding_slots: Set[int] = frozenset({0})
    """KV slots that padded rows may have in a graph. 0: they are stored in page 0, which is reserved. -1: they are not
    stored (vLLM). With both, replays alternate between the two. ``KVPool.set_kv_buffer`` does not accept -1."""
    padded_requests: Set[str] = frozenset({"rows"})
    """Contents of padded requests of a graph. ``rows``: as many rows as at capture, and the fill value as ``seq_lens``.
    ``nothing``: neither rows nor keys (vLLM). If both are declared, ``BackendContext.dialect`` has the one of the
    instance."""
    verify_lens: Set[str] = frozenset({"prefix"})
    """Keys that ``seq_lens`` may count in target-verify. ``prefix``: the keys before the step. ``all``: the step's own
    keys as well (vLLM). If both are declared, ``BackendContext.dialect`` has the one of the instance."""
    context_len: Set[str] = frozenset({"all"})
    """Keys that ``max_context_len`` may bound in steps of drafts. ``all``: those of the step too, so ``req_to_token``
    has as many columns (vLLM). ``prefix``: keys before the step. New tokens of a request at the end of its context have
    positions past it, in further columns (SGLang: ``context_len``, and ``num_draft_tokens`` more), where rows attend to
    them. SGLang drops what it generates past the end, so its backends need not declare it. If both are declared,
    ``BackendContext.dialect`` has the one of the instance."""
    freed_pages: Set[str] = frozenset({"listed"})
    """Entries that the request table of a windowed KV group may have for keys in pages that the group has freed.
    ``listed``: the slots that they had. ``minus_one``: -1 (SGLang's unified pool). ``null_page``: slots of page 0 (null
    block of vLLM). Loops over keys have to begin at the window then. ``BackendContext.dialect`` has the one of the
    instance."""
    takes_none_kv: bool = False
    """True: k and v may be None if ``save_kv_cache`` is False, which is how servers say that the pool holds the new
    keys and values already. The kit then gives None to the first layer and tensors of NaN to the others. False: all get
    tensors of NaN."""
    takes_strided_heads: bool = False
    """True: the heads of new k and v may be strided, as parts of one [T, Hk, Dk + Dv] tensor (``kv_b_proj`` of MLA that
    is attended as MHA). False: the heads of a row are contiguous, so head h begins at ``token * stride + h *
    head_dim``; rows may still be strided."""
    takes_unset_width: bool = False
    """True: ``spec_info.num_tokens_per_req`` may be 0 or -1 during a capture, as in servers up to mid-2026. False: it
    is the width there too."""
    takes_empty_batches: bool = False
    """True: an eager batch may have no request, as on an idle rank; each forward then returns [0, Hq, Dv]. A replay may
    have no live request whatever the backend declares."""
    takes_requests_without_rows: bool = False
    """True: a request of an extend may have no new row between others that have some: its offsets of queries are equal.
    Nothing is stored for it, and its state does not change. A rank of prefill context parallelism gets none of a short
    request's tokens (vllm-ascend #11807). False: only padded requests after the live ones have no rows."""
    takes_bare_chains: bool = False
    """True: a chain may be verified without tree tensors: ``custom_mask`` and ``retrieve_*`` are None, and a row sees
    the prefix, the rows before it and itself. False: a chain is given all of them."""
    takes_out: bool = False
    """True: ``forward`` takes ``out=``, a contiguous [T, Hq, Dv] in the model's dtype with undefined contents, writes
    the output there and returns it. Each call gets another buffer, or None. False: ``out`` is never given."""
    takes_more_rows: bool = False
    """True: a forward may have more rows than its plan, because servers pad a batch after planning. Its batch is then
    another object than that of the plan; ``input_ids``, ``positions`` and ``out_cache_loc`` are longer, with a slot of
    padding, and so are q, k, v and the output. The kit ignores the extra output rows. Never in draft-decode."""
    finite_padding: bool = False
    """True: output rows of no request hold neither NaN nor Inf if their inputs are finite. Servers need that if all
    rows of a forward share something later, such as one scale of FP8 activations (vLLM #57094). ``padding-finite``
    checks it in replays, and in forwards with more rows than their plan. False: nobody reads these rows. SGLang and
    vLLM quantize per tensor for some checkpoints without requiring this of a backend, so their presets have False."""
    takes_unused_scales: bool = False
    """True: ``k_scale`` and ``v_scale`` of a layer may be a checkpoint's, other than 1, over a pool that holds K and V
    unscaled, in the model's dtype. The kernel must then ignore them. False: they are 1 in this case, as vLLM ensures
    (``BaseKVCacheMethod.process_weights_after_loading``)."""
    takes_column_views: bool = False
    """True: ``req_to_token``, ``mm_prefix_range_tensor``, ``selected``, the ``weights`` of an indexer and
    ``state.indices`` may be columns of a wider buffer, so their rows are strided, also if there is one column: a
    request's slot is column 0 of a block table in vLLM. After the columns is whatever an earlier step left there.
    False: these tensors are contiguous, so SGLang's kernels use ``req_to_token.shape[1]`` as its stride."""
    output_lifetime: str = "layer"
    """Time for which an output tensor keeps its contents. ``layer``: until the next ``forward`` of the instance, as if
    all layers share one buffer. ``model``: until every layer of the model has run."""
    narrower_widths: Set[ForwardMode] = frozenset()
    """Modes in which batches of one instance may be narrower than its context: fewer nodes than ``num_draft_tokens`` in
    target-verify (chains), fewer rows in a draft-extend, fewer steps in draft-decode. Graphs of each width are captured
    and replayed in turn; ``BackendContext.draft_widths`` lists the widths, and ``spec_info`` has that of a batch. vLLM
    shortens drafts in this way as batches grow (``num_speculative_tokens_per_batch_size``). SGLang's
    ``speculative_adaptive`` creates an instance for each width, so its backends need not support others."""
    drafts_without_prefix: bool = True
    """True: a request of a draft-decode may have no key before the draft. Servers draft after a prefill, so theirs have
    at least one. Declare False if the planner relies on that."""
    eager_without_waits: bool = True
    """True: eager plans and forwards do not wait for the device if ``Needs.cpu_seq_lens`` is False; a wait fails
    ``no-host-lengths``. Declare False if they may wait, as SGLang's Triton class does for windowed layers."""
    overlap_scheduling: bool = True
    """True: the server may plan the next step while the device still runs this one, including its copies from pinned
    memory. Declare False if the server has to wait for the device in between."""
    takes_rewritten_table: bool = False
    """True: only plans read ``req_to_token``, so a server that overlaps steps may rewrite rows of it as soon as a plan
    is made, on a stream of its own (SGLang #31270). The kit does so under forwards and replays of
    ``overlap_scheduling``. False: forwards and replays may read it too."""
    two_batch_overlap: bool = False
    """True: a server may cut the rows of a step into two batches and run their layers in turn, with an instance for
    each (``enable_two_batch_overlap`` of SGLang) or a plan for each (dual batch overlap of vLLM). An instance for whole
    batches exists, too. All instances have one KV pool, request table and layers. Both batches are planned before the
    first layer, so an instance shares neither metadata nor outputs with another. Tensors of a batch are slices of those
    of the step, at any address that is aligned to an element. A prompt may have rows in both batches. Batches of a
    draft model are not cut. False: a step is one batch."""
    instances_run_at_once: bool = False
    """True: graphs of two instances may run at once, on two streams. Each has its own pools and graph memory, so the
    two must share no scratch memory. False: one runs after the other."""

    def _check(self) -> None:
        slots = self._listed("padding_slots")
        if not slots or not all(is_whole(slot) and slot in (0, -1) for slot in slots):
            raise ValueError(f"ServerConventions.padding_slots must be {{0}}, {{-1}} or {{0, -1}}, got {slots}")
        self._set("padding_slots", frozenset(slots))
        for name, values in DIALECTS.items():
            self._check_words(name, values)
            if not getattr(self, name):
                raise ValueError(f"ServerConventions.{name} must be some of {', '.join(values)}, got none")
        self._check_modes("narrower_widths")
        others = sorted(self.narrower_widths - _DRAFTS)
        if others:
            raise ValueError(
                f"ServerConventions.narrower_widths has {', '.join(others)}; modes with a width are "
                f"{', '.join(sorted(_DRAFTS))}"
            )
        spelled("output_lifetime", self.output_lifetime, OUTPUT_LIFETIMES)
        self._check_flags()

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Conventions of a context's server that are not declared."""
        kv_dtype = kv_dtype_of(context)
        scaled = not all(layer.k_scale == layer.v_scale == 1.0 for layer in context.layers)
        if kv_dtype == "same" and scaled and not self.takes_unused_scales:
            yield "k_scale or v_scale other than 1 over a pool that holds K and V unscaled,", kv_dtype
        yield from modes_outside("batches of several widths in", context, self.narrower_widths, context.draft_widths)
        yield from ((name, said) for name, said in vars(context.dialect).items() if said not in getattr(self, name))

    @override
    def made_of(self, given: object) -> Self:
        """Convert a value as every record does; ``sglang`` and ``vllm`` name presets."""
        return super().made_of(SERVERS[spelled("server", given, tuple(SERVERS))] if isinstance(given, str) else given)


SGLANG = ServerConventions(drafts_without_prefix=False)
"""SGLang 0.5.23, whose conventions are this kit's defaults, and whose drafts begin after a prefill. Rows of padding and
idle ranks stop in its layers (``RadixAttention``) and reach no backend."""
VLLM = ServerConventions(
    padding_slots=frozenset({-1}),
    padded_requests=frozenset({"nothing"}),
    verify_lens=frozenset({"all"}),
    takes_bare_chains=True,
    takes_out=True,
    takes_more_rows=True,
    output_lifetime="model",
    drafts_without_prefix=False,
    narrower_widths=frozenset({ForwardMode.TARGET_VERIFY}),
)
"""vLLM 0.33.0: the place in its source of each value is in ``bridges/vllm/capabilities.py``."""
SERVERS: Mapping[str, ServerConventions] = {"sglang": SGLANG, "vllm": VLLM}
"""Name, as ``Capabilities(server="vllm")`` has it -> its conventions."""
