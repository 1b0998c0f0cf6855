"""What a backend says it can do. Closed by default: what is not declared is not offered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from .dialect import DIALECTS
from .head_layout import HEAD_LAYOUTS
from .kv_layouts import KV_LAYOUTS
from .merging import LogSumExp
from .modes import Execution, ForwardMode

__all__ = [
    "DTYPES",
    "FAMILIES",
    "FP8_PRODUCTS",
    "KV_DTYPES",
    "LAYER_WINDOWS",
    "MATMUL_DTYPES",
    "Q_SCALES",
    "Capabilities",
    "Requires",
    "Unsupported",
]

FAMILIES = tuple(HEAD_LAYOUTS)
DTYPES = ("fp16", "bf16", "fp32")
KV_DTYPES = ("same", "fp8_e4m3")
FP8_PRODUCTS = ("fp8_e4m3", "fp8_e4m3_unscaled")
MATMUL_DTYPES = ("model", *FP8_PRODUCTS)
Q_SCALES = ("none", "per_token_head", "per_token", "per_tensor")
FP32_PRODUCTS = ("ieee", "tf32")
OUTPUT_LIFETIMES = ("model", "layer")
LAYER_WINDOWS = ("any", "one", "same")


class Unsupported(Exception):
    """Raised by a backend's constructor for a context outside its claims. Never return numbers instead."""


@dataclass(frozen=True)
class Requires:
    """What must be there for the backend's real kernels to run; where it is not, the report says "not run here"."""

    sm: tuple[int, int] | tuple[tuple[int, int], ...] | None = None
    """Lowest and highest compute capability, inclusive, as 90 for SM90; or several such ranges. None: any device."""
    packages: tuple[str, ...] = ()
    """Requirement strings such as ``"flashinfer-python>=0.7.2,<0.8"``."""
    why: str = ""
    """What the package says about other devices, for the report."""

    def __post_init__(self) -> None:
        if self.sm is not None:
            object.__setattr__(self, "sm", _ranges(self.sm))
        if isinstance(self.packages, str):
            raise ValueError(f"Requires.packages must be a tuple, got {self.packages!r}; write ({self.packages!r},)")
        object.__setattr__(self, "packages", tuple(self.packages))
        for text in self.packages:
            _requirement(text)

    @property
    def sm_ranges(self) -> tuple[tuple[int, int], ...] | None:
        """``sm`` as ranges; None: any device."""
        if self.sm is None or isinstance(self.sm[0], tuple):
            return self.sm
        return (self.sm,)

    def runs_on(self, sm: int) -> bool:
        """Whether the real kernels run on this compute capability (90 for SM90)."""
        return self.sm_ranges is None or any(low <= sm <= high for low, high in self.sm_ranges)


_LOWEST_SM = 20
"""Less is a major version alone."""


def _ranges(sm: Any) -> tuple[Any, ...]:
    """As given, checked, in tuples."""
    pairs = [sm] if _is_pair(sm) else sm
    if not isinstance(pairs, (tuple, list)) or not pairs or not all(_is_pair(pair) for pair in pairs):
        usual = f"({sm}, {sm})" if _is_whole(sm) else "(90, 90), or ((90, 90), (100, 103))"
        raise ValueError(f"Requires.sm must be the lowest and the highest SM, got {sm!r}; write {usual}")
    for low, high in pairs:
        if low > high or low < _LOWEST_SM:
            raise ValueError(f"Requires.sm: no device is from SM{low} to SM{high}; SM90 alone is (90, 90)")
    return tuple(sm) if pairs[0] is sm else tuple(tuple(pair) for pair in pairs)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_whole(number) for number in value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _requirement(text: object) -> None:
    # Imported here: most backends need no package, and the contract is otherwise torch alone.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(str(text))
    except InvalidRequirement as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Requires.packages: {text!r} is no requirement such as 'my-kernels>=1.2': {reason}") from None


_LEAST = {"max_q_rows": 1, "max_extend_tokens": 1, "max_topk": 0, "max_draft_branches": 1, "max_context_len": 1,
          "min_window": 0}  # fmt: skip
_YES_OR_NO = (
    "any_scaling", "window_in_trees", "logit_cap", "sinks", "needs_cpu_seq_lens", "deterministic", "batch_invariant",
    "takes_none_kv", "takes_strided_heads", "takes_unset_width", "takes_empty_batches", "takes_bare_chains",
    "takes_out", "takes_more_rows", "kv_groups", "heads_by_layer", "eager_waits", "drafts_without_prefix",
    "waits_between_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Capabilities:
    """The claims of a backend, as values. Each field answers a question.

    Any iterable of plain values may be given; strings are checked and a wrong spelling is answered with the right one
    (``ValueError``).
    """

    eager: Set[ForwardMode]
    """Which modes run eagerly? One that is in ``graph`` alone is captured and replayed, and no step of it runs eagerly;
    what holds a replay against an eager run is then not judged."""
    graph: Set[ForwardMode] = frozenset()
    """Which modes run under CUDA-graph capture and replay?"""
    families: Set[str] = frozenset({"mha"})
    """Which head layouts? ``mha`` (Hq = Hk), ``gqa``, ``mqa`` (Hk = 1), ``mla`` (latent, absorbed)."""
    dtypes: Set[str] = frozenset({"fp16", "bf16"})
    """Which dtypes of q, k, v and output?"""
    kv_dtypes: Set[str] = frozenset({"same"})
    """Which dtypes of the KV pool? ``same`` as the model, ``fp8_e4m3`` with per-tensor scales."""
    matmul_dtype: str = "model"
    """With an FP8 pool: to what are queries and probabilities rounded before the two products? ``model``: the model's
    dtype; ``fp8_e4m3``: FP8 kernels round both to FP8, queries as ``q_scale`` says. The limits follow from it, and so
    do queries: numbers that FP8 holds for the second, any for the first. Probabilities, of which the row's largest is
    1, are multiplied by 4 at least before they are rounded (FlyDSL by 7, FlashAttention 3 by 256, XQA by 448): without
    a factor all below 2^-10 vanish, which may be most of a long request's weight (flashinfer #5020). A kernel that has
    none says ``fp8_e4m3_unscaled``. Those that sum to 1 vanish in long requests, and no claim allows that.

    Whatever it says: q.k is kept in float32 through scale, soft cap, mask and softmax, and both products accumulate in
    float32. Probabilities may be rounded to the model's dtype before the second product, the output is, and so may be
    partial results that are combined, each once; the sum that they are added to is kept in float32. Logits that are
    rounded to bf16 or fp16 before the softmax are outside the limits, and fail ``matches-oracle``."""
    q_scale: str = "none"
    """With an FP8 pool and ``matmul_dtype`` of FP8: by what are queries divided before they are rounded to FP8, and
    logits multiplied after the product? ``none``: by nothing. Otherwise by the largest absolute value over 448 (the
    largest number of e4m3), or by the next power of two, of which numbers? ``per_token_head``: of one head of one
    token; ``per_token``: of all heads of a token; ``per_tensor``: of all live rows of the forward, without padding.
    A backend with scales of fewer numbers than it declares is right too: its error is smaller.

    Queries are numbers on which this rounding is exact, beyond 448 and below the smallest number of FP8 too. With
    ``per_tensor`` rows that are small next to the largest may vanish, and the limits allow it."""
    fp32_products: str = "ieee"
    """With float32: what are the factors of both products rounded to? ``ieee``: nothing. ``tf32``: 10 bits behind the
    point, as tensor cores do by default (``tl.dot`` without ``input_precision``). The limits follow from it."""
    new_rows_as_given: Set[ForwardMode] = frozenset()
    """With an FP8 pool: in which modes does a forward attend its own k and v as they were given, in the model's dtype?
    Prefill kernels that read them where they are do so, and are more exact. In the other modes they are attended as the
    pool stores them. What earlier forwards stored, those of the same draft and earlier chunks too, is attended as the
    pool holds it, and so is everything where ``save_kv_cache`` is False. The oracle follows."""
    takes_none_kv: bool = False
    """With ``save_kv_cache`` False: may k and v be None? Servers say so that the pool holds the new keys and values
    already. The first layer gets None then, and the others tensors of NaN, as all do without the claim."""
    takes_strided_heads: bool = False
    """May the heads of new k and v be strided? They are parts of [T, H, Dk + Dv] then, as where MLA is attended as MHA
    and one projection gives k and v of each head (``kv_b_proj``). Without it the heads of a row lie one behind the
    other, as models split them off q, k and v of one projection, so that head h is at ``token * stride + h *
    head_dim``: rows may be strided, heads are not."""
    head_dims: Set[int] = frozenset({64, 128})
    """Which widths of a q/k/v row (for MLA: the latent width; the rope part is ``mla_rope_dims``)?"""
    mla_rope_dims: Set[int] = frozenset({64})
    """MLA: which rope widths?"""
    page_sizes: Set[int] = frozenset({16})
    """Which page sizes of the KV pool, in slots?"""
    kv_layouts: Set[str] = frozenset({"nhd"})
    """Which layouts of the KV pool in memory, of those that ``KVPool`` lists? With ``own`` the class lays its pool out
    itself: ``AttentionBackend.lay_out_kv_pool``. ``KVPool.layout`` says which an instance has."""
    gqa_ratios: Set[int] = frozenset({1, 2, 4, 8})
    """Which numbers of query heads for one KV head (``gqa`` and ``mqa``; for ``mla`` the number of heads)?"""
    max_q_rows: int = 1
    """How many query rows may one request have (N of verify, N of v2, S+1 of v1)?"""
    max_extend_tokens: int = 1 << 20
    """How many new tokens may one request have in extend? Prefill kernels take any number; one that is a decode kernel
    for a few rows says how few."""
    max_topk: int = 0
    """How wide may a draft tree branch? 0: no target-verify, 1: chains only, K: trees with up to K children a node."""
    max_draft_branches: int = 1
    """How many branches may a request have in draft-decode? 1: chains only. Not ``max_topk``: a tree in verify takes a
    kernel with a mask, and branches in draft-decode any kernel, with a page table for each."""
    drafts_without_prefix: bool = True
    """In draft-decode, may a request have no key before the draft? Servers draft behind a prefill, so theirs have one
    at least. False for planners that count on it."""
    padding_slots: Set[int] = frozenset({0})
    """Which KV slots may rows of padding have in a graph? 0: they are stored in page 0, which is reserved. -1: they are
    not stored at all (vLLM). With both replays take turns. ``KVPool.set_kv_buffer`` takes no -1."""
    padded_requests: Set[str] = frozenset({"rows"})
    """What may a padded request of a graph have? ``rows``: as many as it was captured with. ``nothing``: neither rows
    nor keys (vLLM). See ``Dialect``, and ``BackendContext.dialect`` for which of several it is."""
    verify_lens: Set[str] = frozenset({"prefix"})
    """What may ``seq_lens`` count in target-verify? ``prefix``: the keys before the step. ``all``: its new ones as
    well (vLLM). See ``Dialect``."""
    takes_bare_chains: bool = False
    """May a chain be verified without a tree, ``custom_mask`` and ``retrieve_*`` None? Draft methods that know no trees
    have it so: a row sees the prefix, the rows before it and itself."""
    non_causal: Set[ForwardMode] = frozenset()
    """In which of extend and target-verify may layers be not causal (``AttentionLayer.causal``)? A row sees all keys of
    its request then, and a verify comes without a tree, ``custom_mask`` and ``retrieve_*`` None: a draft block."""
    kv_groups: bool = False
    """May layers have KV groups (``BackendContext.kv_groups``): a pool, a request table and slots of new tokens for the
    windowed ones, and others for the rest? False: all layers share one. In draft-decode they always do."""
    heads_by_layer: bool = False
    """May layers of one model differ in head counts and head dims, as windowed and full ones, or a draft's, do? Each
    layer's are claimed by ``families``, ``gqa_ratios`` and ``head_dims``. ``BackendContext.head_shapes`` lists those of
    an instance. Layers of MLA all have one shape, and so have those whose keys are attended in parts."""
    kernel_changes_at: Set[int] = frozenset()
    """From which batch sizes on does another kernel run? 8 for one kernel of up to 7 requests and another of more. A
    batch of each size is tried, and one that is smaller by a request."""
    max_context_len: int = 1 << 20
    """How long may prefix plus new tokens be?"""
    sliding_window: Set[ForwardMode] = frozenset()
    """In which modes is ``sliding_window_size`` honoured?"""
    min_window: int = 0
    """What is the smallest W? A row sees itself and W keys before it. 1 for kernels to which a window of 0 is none."""
    layer_windows: str = "any"
    """How may the windows of a model's layers differ? ``any``: each layer has its own, or none. ``one``: layers that
    have one have the same, beside layers that have none, for backends that plan by the model's window. ``same``: all
    layers have the same, or none has one. ``BackendContext.sliding_window_size`` is that of the model."""
    window_in_trees: bool = False
    """With branching trees, is the window counted by position (tree depth), not by row?"""
    any_scaling: bool = True
    """Is the layer's ``scaling`` honoured, whatever it is? False: it is 1/sqrt(head_dim) in all layers, for kernels
    that have no other. MLA always has one of its own: its rows are wider than the heads that they stand for."""
    logit_cap: bool = False
    """Is the soft cap honoured?"""
    sinks: bool = False
    """Are attention sinks honoured?"""
    needs_cpu_seq_lens: bool = True
    """Does planning read ``seq_lens_cpu`` / ``seq_lens_sum`` / ``*_cpu`` lists? If False they are None or trap.

    In extend ``extend_seq_lens_cpu`` and ``extend_prefix_lens_cpu`` are there all the same, in draft-extend v2 the
    first of them: a server knows them without a wait."""
    eager_waits: bool = False
    """May an eager plan or forward wait for the device, although ``needs_cpu_seq_lens`` is False? SGLang's Triton class
    does where a layer has a window (``update_sliding_window_buffer``). Without it a host sync there is a failure."""
    waits_between_steps: bool = False
    """Must the server wait for the device before it plans the next step? Schedulers that overlap the two do not: a plan
    may come while the device has not begun with the step before it, copies from pinned memory included."""
    takes_more_rows: bool = False
    """May a forward have more rows than its plan? Servers pad a batch once it is planned, to sizes of the layers around
    attention. The batch of such a forward is another object than that of the plan: ``input_ids``, ``positions`` and
    ``out_cache_loc`` are longer, with a slot of padding. q, k, v and the output have as many rows; what the output
    holds in those behind the plan is ignored. Not in draft-decode."""
    takes_out: bool = False
    """Does ``forward`` take ``out=``, a contiguous [T, Hq, Dv] of the model's dtype that holds anything? Where it is
    given, the output is written there and ``out`` is returned. Another one comes with each call, or none."""
    output_lifetime: str = "layer"
    """How long does an output hold what it held? ``layer``: until the next ``forward`` of the instance, as where all
    layers share one buffer; the model reads it at once. ``model``: until every layer of the model has run."""
    takes_empty_batches: bool = False
    """May an eager batch have no request? Servers whose ranks take steps together plan such a batch, and every forward
    of it returns [0, Hq, Dv]; others leave it out. A replay of a graph may have no live request whatever this says."""
    takes_unset_width: bool = False
    """May ``spec_info.num_tokens_per_req`` be 0 or -1 while a graph is captured, as servers up to mid-2026 had it?
    Current ones give the width there too."""
    finite_page_tails: Set[str] = frozenset()
    """For which KV dtypes must unused slots of a request's last page hold finite numbers? (Otherwise they hold NaN.)"""
    deterministic: bool = False
    """Does the same batch give the same bits each time?"""
    batch_invariant: bool = False
    """Does a request give the same bits whatever else is in the batch?"""
    lse: LogSumExp | None = None
    """Is a log-sum-exp returned beside the output, in which form, and for which parts of a request's keys?"""
    requires: Requires = field(default_factory=Requires)
    """Hardware and packages that the real kernels need."""
    mode_requires: Mapping[ForwardMode, Requires] = field(default_factory=dict, hash=False)
    """What a mode needs beyond that, where one mode's kernels exist for fewer devices than the others'."""

    def __new__(cls, *args: Any, **claims: Any) -> Capabilities:
        """Answer a misspelt claim with the right one."""
        for name in claims:
            _spelled("capability", name, tuple(cls.__dataclass_fields__))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _spelled("matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        _spelled("q_scale", self.q_scale, Q_SCALES)
        _spelled("fp32_products", self.fp32_products, FP32_PRODUCTS)
        _spelled("output_lifetime", self.output_lifetime, OUTPUT_LIFETIMES)
        _spelled("layer_windows", self.layer_windows, LAYER_WINDOWS)
        if self.q_scale != "none" and self.matmul_dtype not in FP8_PRODUCTS:
            raise ValueError(
                f"Capabilities.q_scale is {self.q_scale!r}, and matmul_dtype='model' says that queries are not rounded "
                "to FP8; write matmul_dtype='fp8_e4m3', or leave q_scale out"
            )
        for name in ("eager", "graph", "sliding_window", "new_rows_as_given", "non_causal"):
            object.__setattr__(self, name, _modes(name, getattr(self, name)))
        causal = sorted(self.non_causal - {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
        if causal:
            raise ValueError(f"Capabilities.non_causal is of extend and target-verify, got {', '.join(causal)}")
        of_pool = (("kv_dtypes", KV_DTYPES), ("finite_page_tails", KV_DTYPES), ("kv_layouts", KV_LAYOUTS))
        for name, known in (("families", tuple(HEAD_LAYOUTS)), ("dtypes", DTYPES), *of_pool):
            object.__setattr__(
                self, name, frozenset(_spelled(name, v, known) for v in _listed(name, getattr(self, name)))
            )
        for name, least in (("head_dims", 1), ("page_sizes", 1), ("gqa_ratios", 1), ("mla_rope_dims", 0),
                            ("kernel_changes_at", 2)):  # fmt: skip
            values = _listed(name, getattr(self, name))
            if not all(_is_whole(v) and v >= least for v in values):
                numbers = f"whole numbers from {least} on" if least > 1 else "positive whole numbers"
                raise ValueError(f"Capabilities.{name} must be {numbers}, got {sorted(map(str, values))}")
            object.__setattr__(self, name, frozenset(values))
        for name, spoken in DIALECTS.items():
            said = frozenset(_spelled(name, v, spoken) for v in _listed(name, getattr(self, name)))
            if not said:
                raise ValueError(f"Capabilities.{name} must be some of {', '.join(spoken)}, got none")
            object.__setattr__(self, name, said)
        slots = _listed("padding_slots", self.padding_slots)
        if not slots or not all(_is_whole(slot) and slot in (0, -1) for slot in slots):
            raise ValueError(f"Capabilities.padding_slots must be {{0}}, {{-1}} or {{0, -1}}, got {slots}")
        object.__setattr__(self, "padding_slots", frozenset(slots))
        for name, least in _LEAST.items():
            number = getattr(self, name)
            if not _is_whole(number) or number < least:
                raise ValueError(f"Capabilities.{name} must be a whole number from {least} on, got {number!r}")
        for name in _YES_OR_NO:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Capabilities.{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.lse, LogSumExp | None):
            raise ValueError(f"Capabilities.lse must be a LogSumExp, got {self.lse!r}; write LogSumExp(base='e', ...)")
        self._check_requirements()
        if ForwardMode.TARGET_VERIFY in self.eager | self.graph and not self.max_topk:
            raise ValueError(
                "Capabilities claim target-verify, and max_topk=0 claims no draft tree; write max_topk=1 for chains, "
                "max_topk=K for trees of up to K children a node, or leave target-verify out"
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
                raise ValueError(f"Capabilities.{name} must be a Requires, got {given!r}; {_write_requires(given)}")
        spelled = {min(_modes("mode_requires", [m])): of_mode for m, of_mode in self.mode_requires.items()}
        object.__setattr__(self, "mode_requires", spelled)

    def offers(self, mode: ForwardMode, execution: Execution) -> bool:
        """Whether this mode is claimed in this execution."""
        return mode in (self.graph if execution is Execution.GRAPH else self.eager)

    def with_changes(self, **changes: object) -> Capabilities:
        """A copy with some claims replaced; for subclasses that narrow or widen a parent's claims."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Capabilities(**{**values, **changes})


def _write_requires(given: object) -> str:
    """How it is written, with what was given where that can be read."""
    if isinstance(given, Mapping) and set(given) <= {"sm", "packages", "why"}:
        sm = given.get("sm")
        values = {**given, "sm": (sm, sm)} if isinstance(sm, int) else dict(given)
        return f"write Requires({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    return "write Requires(sm=(90, 90), packages=('my-kernels>=1.2',))"


def _listed(name: str, values: object) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"Capabilities.{name} must be a set or list of values, got {values!r}; write {{{values!r}}}")
    return list(values)


def _modes(name: str, values: object) -> frozenset[ForwardMode]:
    spelled = [
        _spelled(name, getattr(v, "value", v), tuple(m.value for m in ForwardMode)) for v in _listed(name, values)
    ]
    return frozenset(ForwardMode(v) for v in spelled)


def _spelled(name: str, value: object, known: tuple[str, ...]) -> str:
    if value in known:
        return str(value)
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown {name} {value!r}{hint} (known: {', '.join(known)})")
