"""Capabilities that a backend declares: two sets of modes, and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from .bounds import Bounds
from .compressor import Compressor, refused_compressors
from .context import BackendContext
from .cross_attention import CrossAttention
from .declared import Declared, mode_named
from .encoder_only import EncoderOnly
from .hand_over import Receives
from .head_layout import HEAD_LAYOUTS
from .head_shapes import HeadShapes
from .kv_pools import KVPools
from .layer_options import LayerOptions
from .merging import LogSumExp, refused_splits
from .modes import Execution, ForwardMode
from .offloading import Offloads
from .precision import Precision
from .prefill_ranks import PrefillRanks, refused_rows
from .promises import Needs, Promises
from .refusal import Refusal, modes_outside
from .requires import Requires, written_requires
from .row_format import ROW_FORMATS
from .server_conventions import ServerConventions
from .spans import Spans
from .sparse import Sparse, refused_selections
from .state import State, refused_states
from .state_kind import STATE_KINDS
from .windows import Windows

__all__ = ["Capabilities", "Unsupported"]

_IN_DRAFTS = frozenset({ForwardMode.DRAFT_EXTEND_V2})
"""Modes of a draft model in which layers run if all kinds have ``StateKind.in_drafts``."""
_MODES_OF_STATES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


class Unsupported(Exception):
    """Raised by a backend's constructor for a context that it does not declare. Never return numbers instead."""


@dataclass(frozen=True)
class Capabilities(Declared):
    """Capabilities that a backend declares. The kit tries only these, and expects the constructor to refuse all others.

    Most entries are records. A dict is short for one: ``heads={"head_dims": {128}}``. ``True``, a larger number or a
    bigger set declares more support; in ``needs``, ``requires`` and ``mode_requires`` it declares less. Any iterable of
    plain values is accepted. A misspelt word raises ``ValueError`` with the right one.

    Most defaults are narrow. These are wide, so a backend that can do less must declare it: ``any_scaling`` in
    ``options``; ``max_extend_tokens`` and ``max_context_len`` in ``bounds``; in ``windows``, once it has modes,
    ``smallest`` and ``layers``; in ``server`` ``drafts_without_prefix``, ``eager_without_waits`` and
    ``overlap_scheduling``.
    """

    eager: Set[ForwardMode]
    """Modes that run eagerly. A mode that is only in ``graph`` is captured and replayed, and no step of it runs
    eagerly; the kit then skips the checks that compare a replay with an eager run."""
    graph: Set[ForwardMode] = frozenset()
    """Modes that run under CUDA-graph capture and replay."""
    heads: HeadShapes = field(default_factory=HeadShapes)
    """Shapes of q, k and v."""
    precision: Precision = field(default_factory=Precision)
    """Dtypes of q, k, v and of the output, and how the kernel rounds."""
    kv_pool: KVPools = field(default_factory=KVPools)
    """The paged KV memory: dtypes, page sizes, layouts."""
    windows: Windows = field(default_factory=Windows)
    """Sliding windows that the backend honors. A set of modes is short for ``Windows(modes)``."""
    options: LayerOptions = field(default_factory=LayerOptions)
    """Options of a layer that the backend honors."""
    spans: Spans = field(default_factory=Spans)
    """Bidirectional spans that the backend honors, as rows of an image have. A set of modes is short for
    ``Spans(modes)``."""
    sparse: Sparse | None = None
    """Selections of keys that the backend supports (DSA). A backend that declares it always gets a selection. Without
    the declaration a row attends to all keys that it may see."""
    state: State | None = None
    """Recurrent states that the backend supports (``StateBackend``). None: layers attend to keys."""
    compressor: Compressor | None = None
    """Compression of keys that the backend supports (``CompressorBackend``). None: layers attend to keys."""
    cross_attention: CrossAttention = field(default_factory=CrossAttention)
    """Cross-attention layers of encoder-decoder models, next to layers of the decoder's own keys."""
    encoder_only: EncoderOnly = field(default_factory=EncoderOnly)
    """Layers of encoders, in extend: attention among the rows of a step, without a cache."""
    bounds: Bounds = field(default_factory=Bounds)
    """The largest steps that the backend supports."""
    server: ServerConventions = field(default_factory=ServerConventions)
    """Conventions of servers that the backend supports. ``SGLANG`` and ``VLLM``, or ``"sglang"`` and ``"vllm"``,
    describe one server; the default describes what all servers do."""
    promises: Promises = field(default_factory=Promises)
    """Promises of the backend. The kit adds a check for each."""
    lse: LogSumExp | None = None
    """Form of the log-sum-exp that ``forward_return_lse`` returns, and the KV splits for which it is called. None: it
    returns no log-sum-exp."""
    prefill_ranks: PrefillRanks | None = None
    """Ways in which the rows of a prompt may be dealt among ranks (prefill context parallelism), in extend. None: an
    instance computes all rows of its prompts."""
    receives: Receives | None = None
    """Instances from which the backend receives the memory of requests, such as prefill servers
    (``AttentionBackend.receive``). None: its requests have all their tokens here."""
    offloads: Offloads | None = None
    """Memory of requests that the backend moves to the host and back (``AttentionBackend.offload`` and ``reload``).
    None: memory of requests does not leave."""
    needs: Needs = field(default_factory=Needs)
    """Needs of the backend. A backend that needs less can do more."""
    requires: Requires = field(default_factory=Requires)
    """Hardware and packages that the real kernels need."""
    mode_requires: Mapping[ForwardMode, Requires] = field(default_factory=dict, hash=False)
    """Additional requirements of single modes whose kernels exist for fewer devices."""

    def _check(self) -> None:
        self._check_modes("eager", "graph")
        if not isinstance(self.lse, LogSumExp | None):
            raise ValueError(f"Capabilities.lse must be a LogSumExp, got {self.lse!r}; write LogSumExp(base='e', ...)")
        if not isinstance(self.sparse, Sparse | None):
            raise ValueError(f"Capabilities.sparse must be a Sparse, got {self.sparse!r}; write Sparse(topk={{2048}})")
        if not isinstance(self.receives, Receives | None):
            raise ValueError(
                f"Capabilities.receives must be a Receives, got {self.receives!r}; write Receives(page_sizes={{16}})"
            )
        if not isinstance(self.offloads, Offloads | None):
            raise ValueError(
                f"Capabilities.offloads must be an Offloads, got {self.offloads!r}; write "
                "Offloads(host_layouts={'layer_first'})"
            )
        self._check_prefill_ranks()
        self._check_row_formats()
        if self.sparse is not None:
            self._check_sparse(self.sparse)
        self._check_state()
        self._check_compressor()
        self._check_encoders()
        self._check_requirements()
        if ForwardMode.TARGET_VERIFY in self.eager | self.graph and not self.bounds.max_topk:
            raise ValueError(
                "Capabilities declare target-verify, and bounds.max_topk=0 declares no draft tree; write max_topk=1 "
                "for chains, max_topk=K for trees of up to K children per node, or leave target-verify out"
            )

    def _check_prefill_ranks(self) -> None:
        ranks = self.prefill_ranks
        if not isinstance(ranks, PrefillRanks | None):
            raise ValueError(
                f"Capabilities.prefill_ranks must be a PrefillRanks, got {ranks!r}; write PrefillRanks({{'zigzag'}})"
            )
        if ranks is None:
            return
        if ForwardMode.EXTEND not in self.eager:
            raise ValueError("Capabilities.prefill_ranks deals the rows of prompts; add 'extend' to eager")
        if self.sparse is not None:
            raise ValueError("Capabilities declare sparse and prefill_ranks, but no case combines them; leave one out")
        if self.state is not None and (ranks.orders != {"blocks"} or ranks.gathers):
            raise ValueError(
                "Capabilities declare state and prefill_ranks: a state passes from rank to rank, so each has one block "
                "of consecutive rows; write PrefillRanks({'blocks'})"
            )

    def _check_row_formats(self) -> None:
        for form in (ROW_FORMATS[name] for name in sorted(self.kv_pool.kv_dtypes) if name in ROW_FORMATS):
            others = [
                f"{family} of {width}{f' and a rope part of {rope}' if form.latent else ''} in {dtype}"
                for family in sorted(self.heads.families)
                for width in sorted(self.heads.head_dims)
                for rope in sorted(self.heads.mla_rope_dims) or (0,)
                for dtype in sorted(self.precision.dtypes)
                if not form.fits(HEAD_LAYOUTS[family], dtype, width, rope)
            ]
            if others:
                raise ValueError(
                    f"Capabilities.kv_pool.kv_dtypes contains {form.name}, which has no row format for {others[0]}: "
                    f"its rows hold {form.needs}. Declare only these, or write a class for each"
                )

    def _check_sparse(self, sparse: Sparse) -> None:
        lse, fused = self.lse, sparse.indexer is not None and sparse.indexer.fused
        together = {
            "windows": bool(self.windows.modes), "spans": bool(self.spans.modes),
            "KV splits other than whole": lse is not None and bool(lse.prefix | lse.pages | lse.tokens),
            "kv_pool.kv_groups": self.kv_pool.kv_groups, "heads.heads_by_layer": self.heads.heads_by_layer,
            "bounds.max_topk above 1": self.bounds.max_topk > 1,
            "cross_attention": bool(self.cross_attention.modes),
            "lse with a fused indexer": lse is not None and fused,
            f"lse.ranks with index_space={sparse.index_space!r}":
                lse is not None and bool(lse.ranks) and sparse.index_space != "positions",
            "lse.ranks with per_kv_head": lse is not None and bool(lse.ranks) and sparse.per_kv_head,
        }  # fmt: skip
        for name in (name for name, declared in together.items() if declared):
            raise ValueError(f"Capabilities declare sparse and {name}, but no case combines them; leave {name} out")
        if sparse.index_space == "pages" and self.kv_pool.page_sizes != {sparse.block}:
            raise ValueError(
                f"Capabilities declare sparse.block={sparse.block} with index_space='pages', and kv_pool.page_sizes "
                f"{sorted(self.kv_pool.page_sizes)}: an index is a page, so declare "
                f"kv_pool.page_sizes={{{sparse.block}}}"
            )
        if sparse.fewer_rows and not self.server.takes_more_rows:
            raise ValueError(
                "Capabilities declare sparse.fewer_rows without server.takes_more_rows, and only padded q has more "
                'rows than `selected`; declare both: server={"takes_more_rows": True}'
            )

    def _check_state(self) -> None:
        if not isinstance(self.state, State | None):
            raise ValueError(f"Capabilities.state must be a State, got {self.state!r}; write State(k_dims={{128}})")
        of_states = {name for name in self.heads.families if HEAD_LAYOUTS[name].has_state}
        if self.state is None and not of_states:
            return
        if self.state is None or self.heads.families - of_states:
            raise ValueError(
                f"Capabilities.heads.families are {', '.join(sorted(self.heads.families))}, and state={self.state!r}: "
                f"layers that keep a state are {', '.join(STATE_KINDS)}, and need state=State(...); others have none"
            )
        kinds = [STATE_KINDS[name] for name in sorted(of_states)]
        allowed = _MODES_OF_STATES | (_IN_DRAFTS if all(kind.in_drafts for kind in kinds) else frozenset())
        others = (self.eager | self.graph) - allowed
        if others:
            raise ValueError(
                f"Capabilities declare state and {', '.join(sorted(others))}: layers that keep a state run in "
                f"{', '.join(sorted(allowed))}; a draft model has attention layers, or convolutions (a class whose "
                "only family is conv), which run in draft-extend-v2. Leave the mode out"
            )
        alone = [kind.name for kind in kinds if not kind.recurs]
        if alone and (max(self.state.conv_widths) == 1 or not self.state.plain_convolution):
            raise ValueError(
                f"Capabilities.heads.families have {alone[0]}, whose layers are a convolution of 2 taps or more "
                "without an activation: State.conv_widths needs such a width, and State.plain_convolution is then True"
            )
        if (self.bounds.max_topk > 1) != bool(self.state.trees & self.heads.families):
            raise ValueError(
                f"Capabilities declare bounds.max_topk={self.bounds.max_topk} and "
                f"State.trees={sorted(self.state.trees)}: drafts that branch need both, and a kind of families in "
                "trees; without trees, drafts are chains (max_topk=1)"
            )
        if self.state.trees and "commit" not in self.state.rollback:
            raise ValueError(
                "State.trees needs rollback 'commit': with a slot for each node a draft is a chain; leave trees out"
            )

    def _check_compressor(self) -> None:
        if not isinstance(self.compressor, Compressor | None):
            raise ValueError(
                f"Capabilities.compressor must be a Compressor, got {self.compressor!r}; write "
                "Compressor(ratios={128})"
            )
        compressing = {name for name in self.heads.families if HEAD_LAYOUTS[name].compresses}
        if self.compressor is None and not compressing:
            return
        if self.compressor is None or self.heads.families - compressing:
            raise ValueError(
                f"Capabilities.heads.families are {', '.join(sorted(self.heads.families))}, and "
                f"compressor={self.compressor!r}: layers that compress keys are compressor, and need "
                "compressor=Compressor(...); others have none"
            )
        others = (self.eager | self.graph) - _MODES_OF_STATES
        if others:
            raise ValueError(
                f"Capabilities declare compressor and {', '.join(sorted(others))}: draft models have no compressor, so "
                f"it runs in {', '.join(sorted(_MODES_OF_STATES))}. Leave the mode out"
            )
        ratios = self.compressor.ratios | self.compressor.overlapping_ratios
        for form in (ROW_FORMATS[name] for name in sorted(self.compressor.rows & ROW_FORMATS.keys())):
            wrong = [
                f"{width} in {dtype}"
                for width in sorted(self.heads.head_dims)
                for dtype in sorted(self.precision.dtypes)
                if not form.fits(HEAD_LAYOUTS["compressor"], dtype, width)
            ]
            if wrong:
                raise ValueError(
                    f"Capabilities.compressor.rows contains {form.name}, which has no row format for rows of "
                    f"{wrong[0]}: its rows hold {form.needs}. Declare only these, or write a class for each"
                )
        cut = [(page, each) for page in sorted(self.kv_pool.page_sizes) for each in sorted(ratios) if page % each]
        if cut:
            raise ValueError(
                f"Capabilities.kv_pool.page_sizes contains {cut[0][0]}, and compressor a ratio of {cut[0][1]}: a page "
                "holds whole groups. Declare only multiples, or write a class for each"
            )

    def _check_encoders(self) -> None:
        modes, encoders = self.eager | self.graph, self.encoder_only
        if encoders.layers and ForwardMode.EXTEND not in modes & self.options.non_causal:
            raise ValueError(
                "Capabilities declare encoder_only, whose layers run in extend and are not causal; add 'extend' to the "
                "modes and to options.non_causal"
            )
        if encoders.only and modes != {ForwardMode.EXTEND}:
            raise ValueError(
                "Capabilities declare encoder_only.only: such a backend runs in extend and in no other mode, got "
                f"{', '.join(sorted(modes))}"
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
        yield from modes_outside("mode", context, self.eager | self.graph)
        for name in _REFUSING:
            yield from getattr(self, name).refused(context)
        yield from refused_splits(self.lse, context)
        yield from refused_selections(self.sparse, context)
        yield from refused_states(self.state, context)
        yield from refused_compressors(self.compressor, context)
        yield from refused_rows(self.prefill_ranks, context)

    def offers(self, mode: ForwardMode, execution: Execution) -> bool:
        """Return True if this mode is declared in this execution."""
        return mode in (self.graph if execution is Execution.GRAPH else self.eager)


_REFUSING = (
    "heads", "precision", "kv_pool", "bounds", "options", "windows", "spans", "cross_attention",
    "encoder_only", "server",
)  # fmt: skip
"""Records that refuse contexts, in the order in which a refusal names them."""
