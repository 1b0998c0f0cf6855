"""Capabilities that a backend declares, in nine groups of fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from .context import BackendContext
from .cross_attention import CrossAttention
from .declared import Declared, is_whole, mode_named, spelled
from .head_layout import HEAD_LAYOUTS
from .kv_layouts import KV_LAYOUTS
from .merging import LogSumExp, refused_splits
from .modes import Execution, ForwardMode
from .refusal import Refusal, first_outside, kv_dtype_of, modes_outside, name_of_dtype
from .requires import Requires, written_requires
from .row_format import ROW_FORMATS
from .server_conventions import ServerConventions
from .spans import Spans
from .sparse import Sparse, refused_selections
from .state import State, refused_states
from .windows import Windows

__all__ = [
    "DTYPES",
    "FAMILIES",
    "FP8_PRODUCTS",
    "GUESSED",
    "KV_DTYPES",
    "MATMUL_DTYPES",
    "Q_SCALES",
    "Capabilities",
    "Unsupported",
    "unwritten",
]

FAMILIES = tuple(HEAD_LAYOUTS)
DTYPES = ("fp16", "bf16", "fp32")
KV_DTYPES = ("same", "fp8_e4m3", *ROW_FORMATS)
FP8_PRODUCTS = ("fp8_e4m3", "fp8_e4m3_unscaled")
MATMUL_DTYPES = ("model", *FP8_PRODUCTS)
Q_SCALES = ("none", "per_token_head", "per_token", "per_tensor")
FP32_PRODUCTS = ("ieee", "tf32")
_MODES_OF_STATES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
_LEAST = {"max_q_rows": 1, "max_extend_tokens": 1, "max_topk": 0, "max_draft_branches": 1, "max_context_len": 1}


class Unsupported(Exception):
    """Raised by a backend's constructor for a context that it does not declare. Never return numbers instead."""


GUESSED = ("families", "gqa_ratios", "head_dims", "dtypes", "page_sizes", "max_context_len")
"""Capabilities whose defaults are guesses: a backend that supports more, but does not declare it, is tested with
less."""


@dataclass(frozen=True)
class Capabilities(Declared):
    """Capabilities that a backend declares. The kit tries only these, and expects the constructor to refuse all others.

    Fields are in nine groups. In every group but the last, ``True``, a larger number or a bigger set declares more
    support. In the last group (requirements) it declares less. Any iterable of plain values is accepted. A misspelt
    word raises ``ValueError`` with the right one.

    Most defaults are narrow. These are wide, so a backend that can do less must declare it: ``any_scaling``,
    ``max_extend_tokens``, ``max_context_len``; in ``windows``, once it has modes, ``smallest`` and ``layers``; in
    ``server`` ``drafts_without_prefix``, ``eager_without_waits`` and ``overlap_scheduling``.
    """

    # Modes. The constructor must refuse a mode that is in neither set.
    eager: Set[ForwardMode]
    """Modes that run eagerly. A mode that is only in ``graph`` is captured and replayed, and no step of it runs
    eagerly; the kit then skips the checks that compare a replay with an eager run."""
    graph: Set[ForwardMode] = frozenset()
    """Modes that run under CUDA-graph capture and replay."""

    # Heads. Shapes of q, k and v. The defaults are the usual values.
    families: Set[str] = frozenset({"mha"})
    """Head layouts: ``mha`` (Hq = Hk), ``gqa``, ``mqa`` (Hk = 1), ``mla`` (latent, absorbed)."""
    gqa_ratios: Set[int] = frozenset({1, 2, 4, 8})
    """Numbers of query heads per KV head, for ``gqa`` and ``mqa``. For ``mla``: numbers of query heads."""
    head_dims: Set[int] = frozenset({64, 128})
    """Widths of a q, k and v row. For MLA: width of the latent part; ``mla_rope_dims`` has the rope part."""
    mla_rope_dims: Set[int] = frozenset({64})
    """MLA: widths of the rope part of a key."""
    wider_keys: Set[int] = frozenset()
    """Numbers of columns by which queries and keys may be wider than values, outside MLA: ``{64}`` for keys of 192 next
    to values of 128 (MiMo-V2, DeepSeek's models as MHA). ``head_dims`` are the widths of values. K and V are then
    allocated separately, in the KV layouts ``nhd`` and ``custom``."""
    heads_by_layer: bool = False
    """True: layers of one model may differ in head counts and head dims, as windowed and full layers do, and the layers
    of a draft model. ``families``, ``gqa_ratios`` and ``head_dims`` declare the shape of each layer;
    ``BackendContext.head_shapes`` lists the shapes of an instance. All layers of an MLA model have the same shape, and
    so do the layers of a case with KV splits."""

    # Numbers. How the kernel rounds. The oracle and the limits follow these values.
    dtypes: Set[str] = frozenset({"fp16", "bf16"})
    """Dtypes of q, k, v and of the output: ``fp16``, ``bf16``, ``fp32``."""
    matmul_dtype: str = "model"
    """Dtype to which queries and probabilities are rounded before the two products, with an FP8 pool. ``model``: the
    model's dtype. ``fp8_e4m3``: FP8, with queries scaled as ``q_scale`` declares, and probabilities multiplied by a
    factor of at least 4 before they are rounded (FlyDSL: 7, FlashAttention 3: 256, XQA: 448). ``fp8_e4m3_unscaled``:
    the same, and probabilities are rounded without a factor, so all below 2^-10 vanish (flashinfer #5020). The limits
    and the test data follow from the word. None of these words allows probabilities that sum to 1 when they are rounded
    to FP8, because in long requests they vanish.

    With every value the kit expects that q·k stays in float32 through scale, soft cap, mask and softmax, and that both
    products accumulate in float32. The kernel may round probabilities to the model's dtype before the second product,
    the output, and each partial result that it combines, once; their sum stays in float32. Logits that are rounded to
    bf16 or fp16 before the softmax fail ``matches-oracle``."""
    q_scale: str = "none"
    """Group of numbers that share a scale when queries are rounded to FP8. It matters with an FP8 pool and a
    ``matmul_dtype`` of FP8. The scale is the largest absolute value of the group divided by 448 (the largest number of
    e4m3), or the next power of two. ``none``: queries are not scaled. ``per_token_head``: a scale for each head of each
    token. ``per_token``: a scale for each token. ``per_tensor``: one scale for all live rows of the forward, without
    padding. A backend with finer scales than it declares passes too.

    Test queries are exact under this rounding, beyond 448 and below the smallest number of FP8. With ``per_tensor``,
    rows that are small next to the largest may vanish, and the limits allow it."""
    fp32_products: str = "ieee"
    """Format to which the factors of both products are rounded if the model's dtype is float32. ``ieee``: float32.
    ``tf32``: 10 bits of mantissa, as tensor cores do by default (``tl.dot`` without ``input_precision``). The limits
    follow from it."""
    new_rows_as_given: Set[ForwardMode] = frozenset()
    """Modes in which, with an FP8 pool, a forward attends to its own k and v in the model's dtype, before they are
    rounded to FP8. Prefill kernels that read k and v directly do so. In other modes it attends to them as the pool
    stores them. Tokens that earlier forwards stored (earlier chunks, the same draft) are always used as the pool holds
    them, and so is everything if ``save_kv_cache`` is False. The oracle does the same."""

    # Pool. The paged KV memory.
    kv_dtypes: Set[str] = frozenset({"same"})
    """Dtypes of the KV pool: ``same`` as the model, ``fp8_e4m3`` with per-tensor scales, or rows of a format of
    ``contract/row_format.py``. Their scales are stored in the row or separately: ``fp8_ds_mla`` for MLA in bf16;
    ``int8_per_token_head``, ``fp8_per_token_head``, ``fp8_per_head``, ``nvfp4``, ``fp4_mx_block16`` and ``int4_group8``
    for K and V."""
    page_sizes: Set[int] = frozenset({16})
    """Page sizes of the KV pool, in slots."""
    kv_layouts: Set[str] = frozenset({"nhd"})
    """Layouts of the KV pool in memory, of those that ``KVPool`` lists. With ``custom`` the class allocates the pool
    itself, in ``AttentionBackend.lay_out_kv_pool``. ``KVPool.layout`` is the layout of an instance."""
    kv_groups: bool = False
    """True: layers may have KV groups (``BackendContext.kv_groups``): a pool, a request table and slots of new tokens
    for windowed layers, and others for the rest. False: all layers share one. In draft-decode they always do."""

    # Windows and options of a layer.
    windows: Windows = field(default_factory=Windows)
    """Sliding windows that the backend honors. A set of modes is short for ``Windows(modes)``."""
    any_scaling: bool = True
    """True: the kernel honors every ``AttentionLayer.scaling``. False: all layers have 1/sqrt(head_dim). MLA layers
    always have their own scaling, because their rows are wider than the heads they represent."""
    logit_cap: bool = False
    """True: the kernel honors ``AttentionLayer.logit_cap`` (soft cap)."""
    sinks: bool = False
    """True: the kernel honors ``AttentionLayer.sinks`` (attention sinks)."""
    alibi: Set[ForwardMode] = frozenset()
    """Modes in which the kernel honors ``AttentionLayer.alibi_slopes``, of any values: a rank has the slopes of its own
    heads."""
    spans: Spans = field(default_factory=Spans)
    """Bidirectional spans that the backend honors, as rows of an image have. A set of modes is short for
    ``Spans(modes)``."""
    qq_bias: Set[ForwardMode] = frozenset()
    """Modes, of extend and target-verify, in which the kernel adds ``ForwardBatch.qq_bias``: a tensor of biases among
    the rows of the step (``qq_bias`` of vLLM's ``unified_attention``)."""
    shared_qq_bias: bool = False
    """True: the kernel supports only one bias for all requests, as vLLM's does. The biases of all requests in a batch
    are then equal: row j of any request has the numbers of row j of the first. Drafts with a bias are chains. False:
    each request may have its own."""
    sparse: Sparse | None = None
    """Selections of keys that the backend supports (DSA). A backend that declares it always gets a selection. Without
    the declaration a row attends to all keys that it may see."""
    state: State | None = None
    """Recurrent states that the backend supports (``StateBackend``). None: layers attend to keys."""
    non_causal: Set[ForwardMode] = frozenset()
    """Modes, of extend and target-verify, in which layers may be non-causal (``AttentionLayer.causal`` is False). A row
    then sees all keys of its request. A verify comes without a tree, with ``custom_mask`` and ``retrieve_*`` None, as
    in draft blocks."""

    cross_attention: CrossAttention = field(default_factory=CrossAttention)
    """Cross-attention layers of encoder-decoder models, next to layers of the decoder's own keys."""

    # Bounds. A larger number declares more.
    max_q_rows: int = 1
    """Most query rows of one request: N in target-verify and draft-extend-v2, S + 1 in draft-extend."""
    max_extend_tokens: int = 1 << 20
    """Most new tokens of one request in extend. The default means any number. A decode kernel that supports only a few
    rows declares how many."""
    max_topk: int = 0
    """Widest branching of a draft tree. 0: no target-verify. 1: chains only. K: trees whose nodes have up to K
    children."""
    max_draft_branches: int = 1
    """Most branches of one request in draft-decode. 1: chains only. It differs from ``max_topk``: verifying a tree
    needs a kernel with a mask, whereas draft-decode needs a page table per branch."""
    max_context_len: int = 1 << 20
    """Most tokens of one request, prefix and new tokens together. The default means any number."""
    kernel_changes_at: Set[int] = frozenset()
    """Batch sizes from which a different kernel runs, such as ``{8}`` for a kernel of up to 7 requests and another for
    more. The kit tries a batch of each size, and a batch with one request fewer."""
    kernel_changes_at_keys: Set[int] = frozenset()
    """Sums of the keys of all requests of a batch, this step's included, from which a different kernel runs. The kit
    tries a batch of each sum, and a batch with one key fewer."""

    # Conventions of servers. Differences between servers.
    server: ServerConventions = field(default_factory=ServerConventions)
    """Conventions of servers that the backend supports. ``SGLANG`` and ``VLLM``, or ``"sglang"`` and ``"vllm"``,
    describe one server; the default describes what all servers do."""

    # Promises. The kit adds a check for each.
    deterministic: bool = False
    """True: the same batch gives the same bits each time (``repeatable``). With an indexer, each row also selects the
    same keys each time, those of equal scores included; their order in a row of ``select`` may differ as far as
    ``forward`` gives the same bits. A backend whose top-k breaks ties in the order of arrival must not declare it. The
    top-k of FlashInfer (``deterministic``, ``tie_break``), SGLang and vLLM do so by default."""
    batch_invariant: bool = False
    """True: a request gives the same bits, and selects the same keys, whatever else is in the batch
    (``batch-invariant``)."""
    mode_invariant: bool = False
    """True: a row of decode or of a verified chain gives the same bits as a row of extend with the same keys
    (``mode-invariant``), as reinforcement learning needs it, where a prefill scores tokens that were decoded. It holds
    in eager mode and in replays, in each bucket and with padded requests. The kit compares with an eager extend."""
    lse: LogSumExp | None = None
    """Form of the log-sum-exp that ``forward_return_lse`` returns, and the KV splits for which it is called. None: it
    returns no log-sum-exp."""

    # Requirements. A backend that requires less can do more.
    needs_cpu_seq_lens: bool = True
    """True: planning reads ``seq_lens_cpu``, ``seq_lens_sum`` and the ``*_cpu`` lists. False: they are None, or reading
    them is an error. Extend always has ``extend_seq_lens_cpu`` and ``extend_prefix_lens_cpu``, and draft-extend-v2 the
    first of them, because a server knows them without a host sync."""
    finite_page_tails: Set[str] = frozenset()
    """KV dtypes for which unused slots of a request's last page must hold finite numbers. Otherwise they hold NaN."""
    requires: Requires = field(default_factory=Requires)
    """Hardware and packages that the real kernels need."""
    mode_requires: Mapping[ForwardMode, Requires] = field(default_factory=dict, hash=False)
    """Additional requirements of single modes whose kernels exist for fewer devices."""

    def __post_init__(self) -> None:
        # A default is one object, which a value that somebody writes is not, even if it equals the default.
        left = {name: getattr(Capabilities, name) for name in GUESSED}
        left = {name: default for name, default in left.items() if getattr(self, name) is default}
        self._check()
        for name, default in left.items():
            self._set(name, default)
        self._set("_unwritten", frozenset(left))

    def _check(self) -> None:
        spelled("matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        spelled("q_scale", self.q_scale, Q_SCALES)
        spelled("fp32_products", self.fp32_products, FP32_PRODUCTS)
        if self.q_scale != "none" and self.matmul_dtype not in FP8_PRODUCTS:
            raise ValueError(
                f"Capabilities.q_scale is {self.q_scale!r}, and matmul_dtype='model' says that queries are not rounded "
                "to FP8; write matmul_dtype='fp8_e4m3', or leave q_scale out"
            )
        self._check_modes("eager", "graph", "new_rows_as_given", "non_causal", "alibi", "qq_bias")
        for name in ("non_causal", "qq_bias"):
            others = sorted(getattr(self, name) - {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
            if others:
                raise ValueError(f"Capabilities.{name} may hold only extend and target-verify, got {', '.join(others)}")
        if self.shared_qq_bias and not self.qq_bias:
            raise ValueError(
                "Capabilities declare shared_qq_bias without qq_bias; declare its modes: qq_bias={'target-verify'}"
            )
        of_pool = (("kv_dtypes", KV_DTYPES), ("finite_page_tails", KV_DTYPES), ("kv_layouts", KV_LAYOUTS))
        for name, known in (("families", tuple(HEAD_LAYOUTS)), ("dtypes", DTYPES), *of_pool):
            self._check_words(name, known)
        for name, least in (("head_dims", 1), ("page_sizes", 1), ("gqa_ratios", 1), ("mla_rope_dims", 0),
                            ("wider_keys", 1), ("kernel_changes_at", 2), ("kernel_changes_at_keys", 16)):  # fmt: skip
            values = self._listed(name)
            if not all(is_whole(v) and v >= least for v in values):
                numbers = f"whole numbers from {least} on" if least > 1 else "positive whole numbers"
                raise ValueError(f"Capabilities.{name} must be {numbers}, got {sorted(map(str, values))}")
            self._set(name, frozenset(values))
        self._check_row_formats()
        for name, least in _LEAST.items():
            self._check_number(name, least)
        self._check_flags()
        for name, record in _RECORDS.items():
            self._set(name, record().made_of(getattr(self, name)))
        if not isinstance(self.lse, LogSumExp | None):
            raise ValueError(f"Capabilities.lse must be a LogSumExp, got {self.lse!r}; write LogSumExp(base='e', ...)")
        if not isinstance(self.sparse, Sparse | None):
            raise ValueError(f"Capabilities.sparse must be a Sparse, got {self.sparse!r}; write Sparse(topk={{2048}})")
        if self.sparse is not None:
            self._check_sparse()
        self._check_state()
        self._check_requirements()
        if ForwardMode.TARGET_VERIFY in self.eager | self.graph and not self.max_topk:
            raise ValueError(
                "Capabilities declare target-verify, and max_topk=0 declares no draft tree; write max_topk=1 for "
                "chains, "
                "max_topk=K for trees of up to K children per node, or leave target-verify out"
            )

    def _check_row_formats(self) -> None:
        for form in (ROW_FORMATS[name] for name in sorted(self.kv_dtypes) if name in ROW_FORMATS):
            others = [
                f"{family} of {width} in {dtype}"
                for family in sorted(self.families)
                for width in sorted(self.head_dims)
                for dtype in sorted(self.dtypes)
                if not form.fits(HEAD_LAYOUTS[family], dtype, width)
            ]
            if others:
                raise ValueError(
                    f"Capabilities.kv_dtypes contains {form.name}, which has no row format for {others[0]}: its rows "
                    f"hold {form.needs}. Declare only these, or write a class for each"
                )

    def _selects_in_forward(self) -> bool:
        return self.sparse is not None and self.sparse.indexer is not None and self.sparse.indexer.fused

    def _check_sparse(self) -> None:
        parts = self.lse is not None and bool(self.lse.prefix | self.lse.pages | self.lse.tokens)
        together = {
            "windows": bool(self.windows.modes), "spans": bool(self.spans.modes),
            "non_causal": bool(self.non_causal), "KV splits other than whole": parts,
            "kv_groups": self.kv_groups, "heads_by_layer": self.heads_by_layer, "max_topk above 1": self.max_topk > 1,
            "cross_attention": bool(self.cross_attention.modes),
            "lse with a fused indexer": self.lse is not None and self._selects_in_forward(),
        }  # fmt: skip
        for name in (name for name, declared in together.items() if declared):
            raise ValueError(f"Capabilities declare sparse and {name}, but no case combines them; leave {name} out")
        if self.sparse is not None and self.sparse.fewer_rows and not self.server.takes_more_rows:
            raise ValueError(
                "Capabilities declare sparse.fewer_rows without server.takes_more_rows, and only padded q has more "
                'rows than `selected`; declare both: server={"takes_more_rows": True}'
            )

    def _check_state(self) -> None:
        if not isinstance(self.state, State | None):
            raise ValueError(f"Capabilities.state must be a State, got {self.state!r}; write State(k_dims={{128}})")
        of_states = {name for name in self.families if HEAD_LAYOUTS[name].has_state}
        if self.state is None and not of_states:
            return
        if self.state is None or self.families - of_states:
            raise ValueError(
                f"Capabilities.families are {', '.join(sorted(self.families))}, and state={self.state!r}: layers that "
                "keep a state are gdn, kda, mamba and lightning, and need state=State(...); others have none"
            )
        others = (self.eager | self.graph) - _MODES_OF_STATES
        if others:
            raise ValueError(
                f"Capabilities declare state and {', '.join(sorted(others))}: layers that keep a state run in "
                f"{', '.join(sorted(_MODES_OF_STATES))}; a draft model has attention layers. Leave the mode out"
            )
        if (self.max_topk > 1) != bool(self.state.trees & self.families):
            raise ValueError(
                f"Capabilities declare max_topk={self.max_topk} and State.trees={sorted(self.state.trees)}: drafts "
                "that branch need both, and a kind of families in trees; without trees, drafts are chains (max_topk=1)"
            )
        if self.state.trees and "commit" not in self.state.rollback:
            raise ValueError(
                "State.trees needs rollback 'commit': with a slot for each node a draft is a chain; leave trees out"
            )

    def _check_requirements(self) -> None:
        if not isinstance(self.mode_requires, Mapping):
            raise ValueError(
                f"Capabilities.mode_requires must be a dict, got {self.mode_requires!r}; "
                "write {'decode': Requires(sm=(90, 90))}"
            )
        needs: dict[str, object] = {"requires": self.requires}
        needs |= {f"mode_requires[{str(mode)!r}]": of_mode for mode, of_mode in self.mode_requires.items()}
        for name, given in needs.items():
            if not isinstance(given, Requires):
                raise ValueError(f"Capabilities.{name} must be a Requires, got {given!r}; {written_requires(given)}")
        self._set("mode_requires", {mode_named("mode_requires", m): each for m, each in self.mode_requires.items()})

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Everything in a context that is not declared, each with its value. Each record names what it does not declare
        itself."""
        yield from self._refused_heads(context)
        yield from self._refused_numbers(context)
        yield from self._refused_bounds(context)
        yield from self._refused_options(context)
        yield from self.windows.refused(context)
        yield from self.spans.refused(context)
        yield from self.cross_attention.refused(context)
        yield from self.server.refused(context)
        yield from refused_splits(self.lse, context)
        yield from refused_selections(self.sparse, context)
        yield from refused_states(self.state, context)

    def _refused_heads(self, context: BackendContext) -> Iterator[Refusal]:
        yield from modes_outside("mode", context, self.eager | self.graph)
        # The softmax layers of a hybrid model follow from its layers that keep a state.
        hybrid = self.state is not None and self.state.hybrid
        own = [layer for layer in context.layers if layer.head_layout.has_state or not hybrid]
        apart = [layer for layer in own if not (layer.head_layout.values_in_keys or layer.head_layout.has_state)]
        latent = [layer for layer in context.layers[:1] if layer.head_layout.values_in_keys]
        grouped = [layer.q_per_kv for layer in context.layers if layer.head_layout.kv_heads != "as many"]
        shapes = len({layer.head_shape for layer in own})
        yield from first_outside("family", (layer.head_layout.name for layer in own), self.families)
        yield from first_outside("head dim", (layer.v_head_dim for layer in context.layers), self.head_dims)
        ropes = (layer.head_dim - layer.kv_lora_rank for layer in latent)
        yield from first_outside("MLA rope dim", ropes, self.mla_rope_dims)
        wider = (layer.head_dim - layer.v_head_dim for layer in apart)
        yield from first_outside("columns by which keys are wider than values,", wider, self.wider_keys | {0})
        yield from first_outside("GQA ratio", grouped, self.gqa_ratios)
        if shapes > 1 and not self.heads_by_layer:
            yield "number of head shapes", shapes

    def _refused_numbers(self, context: BackendContext) -> Iterator[Refusal]:
        yield from first_outside("dtype", [name_of_dtype(context.dtype)], self.dtypes)
        yield from first_outside("KV dtype", [kv_dtype_of(context)], self.kv_dtypes)
        yield from first_outside("page size", [context.page_size], self.page_sizes)
        yield from first_outside("KV layout", [context.kv_pool.layout], self.kv_layouts)
        if len(context.groups) > 1 and not self.kv_groups:
            yield "number of KV groups", len(context.groups)

    def _refused_bounds(self, context: BackendContext) -> Iterator[Refusal]:
        for what, asked, most in (
            ("query rows per request", max([1] + [_rows(mode, context) for mode in context.modes]), self.max_q_rows),
            ("new tokens per request", context.max_extend_tokens, self.max_extend_tokens),
            ("topk", context.topk, self.max_topk),
            ("draft branches", context.draft_branches, self.max_draft_branches),
            ("context length", context.max_context_len, self.max_context_len),
        ):
            if asked > most:
                yield what, asked

    def _refused_options(self, context: BackendContext) -> Iterator[Refusal]:
        layers = context.layers
        windows = [layer.sliding_window_size for layer in layers if layer.sliding_window_size >= 0]
        slopes = any(layer.alibi_slopes is not None for layer in layers)
        yield from modes_outside("ALiBi in", context, self.alibi, slopes)
        yield from modes_outside("an additive bias in", context, self.qq_bias, context.qq_bias != "none")
        if context.qq_bias == "own" and self.shared_qq_bias:
            yield "an additive bias for each request:", context.qq_bias
        yield from modes_outside("layers that are not causal in", context, self.non_causal, not context.causal)
        if windows and not context.causal:
            yield "a window of layers that are not causal,", min(windows)
        usual = all(layer.has_usual_scaling or not layer.head_layout.usual_scaling for layer in layers)
        if not (usual or self.any_scaling):
            yield "scaling", ", ".join(f"{layer.scaling:.4g}" for layer in layers)
        if (cap := max(layer.logit_cap for layer in layers)) and not self.logit_cap:
            yield "soft cap", cap
        if not self.sinks and any(layer.sinks is not None for layer in layers):
            yield "sinks", "given"

    def offers(self, mode: ForwardMode, execution: Execution) -> bool:
        """Return True if this mode is declared in this execution."""
        return mode in (self.graph if execution is Execution.GRAPH else self.eager)


def _rows(mode: ForwardMode, context: BackendContext) -> int:
    if not mode.is_speculative():
        return 1
    return context.speculative_num_steps + 1 if mode is ForwardMode.DRAFT_EXTEND else context.num_draft_tokens


_RECORDS: Mapping[str, type[Windows | Spans | ServerConventions | CrossAttention]] = {
    "windows": Windows,
    "spans": Spans,
    "server": ServerConventions,
    "cross_attention": CrossAttention,
}


def unwritten(declared: Capabilities) -> frozenset[str]:
    """The names in ``GUESSED`` that the author left out. A value that is written and equals the default is not left
    out."""
    found: frozenset[str] = vars(declared)["_unwritten"]
    return found
