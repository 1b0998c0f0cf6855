"""Capabilities that a backend declares, in nine groups of fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Self

from typing_extensions import override

from .declared import Declared, is_whole, mode_named, spelled
from .head_layout import HEAD_LAYOUTS
from .kv_layouts import KV_LAYOUTS
from .merging import LogSumExp
from .modes import Execution, ForwardMode
from .requires import Requires, written_requires
from .server_conventions import ServerConventions
from .windows import Windows

__all__ = [
    "DTYPES",
    "FAMILIES",
    "FP8_PRODUCTS",
    "KV_DTYPES",
    "MATMUL_DTYPES",
    "MOVED",
    "Q_SCALES",
    "Capabilities",
    "Unsupported",
]

FAMILIES = tuple(HEAD_LAYOUTS)
DTYPES = ("fp16", "bf16", "fp32")
KV_DTYPES = ("same", "fp8_e4m3")
FP8_PRODUCTS = ("fp8_e4m3", "fp8_e4m3_unscaled")
MATMUL_DTYPES = ("model", *FP8_PRODUCTS)
Q_SCALES = ("none", "per_token_head", "per_token", "per_tensor")
FP32_PRODUCTS = ("ieee", "tf32")
_LEAST = {"max_q_rows": 1, "max_extend_tokens": 1, "max_topk": 0, "max_draft_branches": 1, "max_context_len": 1}


class Unsupported(Exception):
    """Raised by a backend's constructor for a context that it does not declare. Never return numbers instead."""


@dataclass(frozen=True)
class Capabilities(Declared):
    """A record of what a backend can do. Each field answers a question.

    Any iterable of plain values may be given; strings are checked and a wrong spelling is answered with the right one
    (``ValueError``). Fields are in nine groups. True, a larger number and a longer set declare more in all of them but
    the last, the requirements. Most fields are closed by default: the kit tries only what you declare, and the backend
    must refuse everything else. Open by default, so that a backend which can do less declares it: ``any_scaling``,
    ``max_extend_tokens``,
    ``max_context_len``; in ``windows``, once it has modes, ``smallest`` and ``layers``; in ``server``
    ``drafts_without_prefix``, ``eager_without_waits`` and ``overlap_scheduling``.
    """

    # Modes. Closed: a mode that is not listed must be refused.
    eager: Set[ForwardMode]
    """Which modes run eagerly? A mode that is only in ``graph`` is captured and replayed, and no step of it runs
    eagerly; then no check compares a replay with an eager run. It has no default: most backends name all modes."""
    graph: Set[ForwardMode] = frozenset()
    """Which modes run under CUDA-graph capture and replay? Default: none."""

    # Heads. The defaults are the usual values, and a longer set declares more.
    families: Set[str] = frozenset({"mha"})
    """Which head layouts? ``mha`` (Hq = Hk), ``gqa``, ``mqa`` (Hk = 1), ``mla`` (latent, absorbed). Default: only
    ``mha``."""
    gqa_ratios: Set[int] = frozenset({1, 2, 4, 8})
    """Which numbers of query heads for one KV head (``gqa`` and ``mqa``; for ``mla`` the number of heads)? Default: 1,
    2, 4, 8."""
    head_dims: Set[int] = frozenset({64, 128})
    """Which widths of a q/k/v row (for MLA: the latent width; the rope part is ``mla_rope_dims``)? Default: 64 and
    128."""
    mla_rope_dims: Set[int] = frozenset({64})
    """MLA: which rope widths? Default: 64."""
    heads_by_layer: bool = False
    """May layers of one model differ in head counts and head dims, as windowed and full ones, or a draft's, do?
    Default: no. Each layer's are declared by ``families``, ``gqa_ratios`` and ``head_dims``.
    ``BackendContext.head_shapes`` lists those of an instance. Layers of MLA all have one shape, and so have those whose
    keys are attended in parts."""

    # Numbers. A longer set declares more. A word says what the kernels do, and no word is more than another: the oracle
    # and the limits follow it.
    dtypes: Set[str] = frozenset({"fp16", "bf16"})
    """Which dtypes of q, k, v and output? Default: ``fp16`` and ``bf16``."""
    matmul_dtype: str = "model"
    """With an FP8 pool: to what are queries and probabilities rounded before the two products? Default, ``model``: the
    model's dtype; ``fp8_e4m3``: FP8 kernels round both to FP8, queries as ``q_scale`` says. The limits follow from it,
    and so do queries: numbers that FP8 holds for the second, any for the first. Probabilities, of which the row's
    largest is 1, are multiplied by 4 at least before they are rounded (FlyDSL by 7, FlashAttention 3 by 256, XQA by
    448): without a factor all below 2^-10 vanish, which may be most of a long request's weight (flashinfer #5020). A
    kernel that has none says ``fp8_e4m3_unscaled``. Those that sum to 1 vanish in long requests, and no capability
    allows that.

    Whatever it says: q.k is kept in float32 through scale, soft cap, mask and softmax, and both products accumulate in
    float32. Probabilities may be rounded to the model's dtype before the second product, the output is, and so may be
    partial results that are combined, each once; the sum that they are added to is kept in float32. Logits that are
    rounded to bf16 or fp16 before the softmax are outside the limits, and fail ``matches-oracle``."""
    q_scale: str = "none"
    """With an FP8 pool and ``matmul_dtype`` of FP8: by what are queries divided before they are rounded to FP8, and
    logits multiplied after the product? Default, ``none``: by nothing. Otherwise by the largest absolute value over 448
    (the largest number of e4m3), or by the next power of two, of which numbers? ``per_token_head``: of one head of one
    token; ``per_token``: of all heads of a token; ``per_tensor``: of all live rows of the forward, without padding. A
    backend with scales of fewer numbers than it declares is right too: its error is smaller.

    Queries are numbers on which this rounding is exact, beyond 448 and below the smallest number of FP8 too. With
    ``per_tensor`` rows that are small next to the largest may vanish, and the limits allow it."""
    fp32_products: str = "ieee"
    """With float32: what are the factors of both products rounded to? Default, ``ieee``: nothing. ``tf32``: 10 bits
    behind the point, as tensor cores do by default (``tl.dot`` without ``input_precision``). The limits follow from
    it."""
    new_rows_as_given: Set[ForwardMode] = frozenset()
    """With an FP8 pool: in which modes does a forward attend its own k and v as they were given, in the model's dtype?
    Default: in none. Prefill kernels that read them where they are do so, and are more exact. In the other modes they
    are attended as the pool stores them. Rows of earlier forwards, also those of the same draft and of earlier chunks,
    are attended as the pool holds them, and so is everything if ``save_kv_cache`` is False. The oracle follows."""

    # Pool. A longer set declares more.
    kv_dtypes: Set[str] = frozenset({"same"})
    """Which dtypes of the KV pool? ``same`` as the model, ``fp8_e4m3`` with per-tensor scales. Default: ``same``."""
    page_sizes: Set[int] = frozenset({16})
    """Which page sizes of the KV pool, in slots? Default: only 16."""
    kv_layouts: Set[str] = frozenset({"nhd"})
    """Which layouts of the KV pool in memory, of those that ``KVPool`` lists? Default: ``nhd``. With ``custom`` the
    class lays its pool out itself: ``AttentionBackend.lay_out_kv_pool``. ``KVPool.layout`` is that of an instance."""
    kv_groups: bool = False
    """May layers have KV groups (``BackendContext.kv_groups``): a pool, a request table and slots of new tokens for the
    windowed ones, and others for the rest? Default: all layers share one. In draft-decode they always do."""

    # Windows and options of a layer. Closed, but for ``any_scaling``.
    windows: Windows = field(default_factory=Windows)
    """Which sliding windows? Default: none in any mode. A set of modes is taken for ``Windows(modes)``."""
    any_scaling: bool = True
    """Is the layer's ``scaling`` honoured, whatever it is? Default: it is. False: it is 1/sqrt(head_dim) in all layers,
    for kernels that have no other. MLA always has one of its own: its rows are wider than the heads that they stand
    for."""
    logit_cap: bool = False
    """Is the soft cap honoured? Default: no."""
    sinks: bool = False
    """Are attention sinks honoured? Default: no."""
    non_causal: Set[ForwardMode] = frozenset()
    """In which of extend and target-verify may layers be not causal (``AttentionLayer.causal``)? Default: in none. A
    row sees all keys of its request then, and a verify comes without a tree, ``custom_mask`` and ``retrieve_*`` None: a
    draft block."""

    # Bounds. A larger one declares more. ``max_extend_tokens`` and ``max_context_len`` are open, the others closed.
    max_q_rows: int = 1
    """How many query rows may one request have (N of verify, N of v2, S+1 of v1)? Default: 1."""
    max_extend_tokens: int = 1 << 20
    """How many new tokens may one request have in extend? Default: any number. Prefill kernels take any number; one
    that is a decode kernel for a few rows says how few."""
    max_topk: int = 0
    """How wide may a draft tree branch? Default, 0: no target-verify, 1: chains only, K: trees with up to K children a
    node."""
    max_draft_branches: int = 1
    """How many branches may a request have in draft-decode? Default, 1: chains only. Not ``max_topk``: a tree in verify
    takes a kernel with a mask, and branches in draft-decode any kernel, with a page table for each."""
    max_context_len: int = 1 << 20
    """How long may prefix plus new tokens be? Default: any number."""
    kernel_changes_at: Set[int] = frozenset()
    """From which batch sizes on does another kernel run? Default: from none. 8 for one kernel of up to 7 requests and
    another of more. A batch of each size is tried, and one that is smaller by a request."""

    # Conventions of servers. Closed, but for three that are the last of ``ServerConventions``.
    server: ServerConventions = field(default_factory=ServerConventions)
    """Which conventions of servers? Default: what all of them do. ``SGLANG`` and ``VLLM`` are what one of them does; so
    are ``"sglang"`` and ``"vllm"``."""

    # Promises. Closed.
    deterministic: bool = False
    """Does the same batch give the same bits each time? Default: no promise."""
    batch_invariant: bool = False
    """Does a request give the same bits whatever else is in the batch? Default: no promise."""
    lse: LogSumExp | None = None
    """Is a log-sum-exp returned with the output, in which form, and for which KV splits? Default: it is not."""

    # Requirements. The less is required, the more a backend can do.
    needs_cpu_seq_lens: bool = True
    """Does planning read ``seq_lens_cpu`` / ``seq_lens_sum`` / ``*_cpu`` lists? Default: it does. If False they are
    None or trap.

    In extend ``extend_seq_lens_cpu`` and ``extend_prefix_lens_cpu`` are there all the same, in draft-extend v2 the
    first of them: a server knows them without a wait."""
    finite_page_tails: Set[str] = frozenset()
    """For which KV dtypes must unused slots of a request's last page hold finite numbers? Default: for none. (Otherwise
    they hold NaN.)"""
    requires: Requires = field(default_factory=Requires)
    """Hardware and packages that the real kernels need. Default: none."""
    mode_requires: Mapping[ForwardMode, Requires] = field(default_factory=dict, hash=False)
    """What does a mode need in addition, if its kernels exist for fewer devices than those of the others? Default:
    nothing."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Answer fields that have moved into a record."""
        _refuse_moved(given, lambda record, values: f"{_RECORDS[record].__name__}({_arguments(values)})")
        return super().__new__(cls, *args, **given)

    def __getattr__(self, name: str) -> Any:
        """Answer a read of a field that has moved into a record."""
        moved = f"; it is now {'.'.join(MOVED[name])}" if name in MOVED else ""
        raise AttributeError(f"Capabilities has no {name!r}{moved}")

    def __post_init__(self) -> None:
        spelled("matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        spelled("q_scale", self.q_scale, Q_SCALES)
        spelled("fp32_products", self.fp32_products, FP32_PRODUCTS)
        if self.q_scale != "none" and self.matmul_dtype not in FP8_PRODUCTS:
            raise ValueError(
                f"Capabilities.q_scale is {self.q_scale!r}, and matmul_dtype='model' says that queries are not rounded "
                "to FP8; write matmul_dtype='fp8_e4m3', or leave q_scale out"
            )
        self._check_modes("eager", "graph", "new_rows_as_given", "non_causal")
        causal = sorted(self.non_causal - {ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
        if causal:
            raise ValueError(f"Capabilities.non_causal may hold only extend and target-verify, got {', '.join(causal)}")
        of_pool = (("kv_dtypes", KV_DTYPES), ("finite_page_tails", KV_DTYPES), ("kv_layouts", KV_LAYOUTS))
        for name, known in (("families", tuple(HEAD_LAYOUTS)), ("dtypes", DTYPES), *of_pool):
            self._check_words(name, known)
        for name, least in (("head_dims", 1), ("page_sizes", 1), ("gqa_ratios", 1), ("mla_rope_dims", 0),
                            ("kernel_changes_at", 2)):  # fmt: skip
            values = self._listed(name)
            if not all(is_whole(v) and v >= least for v in values):
                numbers = f"whole numbers from {least} on" if least > 1 else "positive whole numbers"
                raise ValueError(f"Capabilities.{name} must be {numbers}, got {sorted(map(str, values))}")
            self._set(name, frozenset(values))
        for name, least in _LEAST.items():
            self._check_number(name, least)
        self._check_flags()
        for name, record in _RECORDS.items():
            self._set(name, record().made_of(getattr(self, name)))
        if not isinstance(self.lse, LogSumExp | None):
            raise ValueError(f"Capabilities.lse must be a LogSumExp, got {self.lse!r}; write LogSumExp(base='e', ...)")
        self._check_requirements()
        if ForwardMode.TARGET_VERIFY in self.eager | self.graph and not self.max_topk:
            raise ValueError(
                "Capabilities declare target-verify, and max_topk=0 declares no draft tree; write max_topk=1 for "
                "chains, "
                "max_topk=K for trees of up to K children per node, or leave target-verify out"
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

    def offers(self, mode: ForwardMode, execution: Execution) -> bool:
        """Return True if this mode is declared in this execution."""
        return mode in (self.graph if execution is Execution.GRAPH else self.eager)

    @override
    def with_changes(self, **changes: object) -> Self:
        """A copy with some fields replaced; for subclasses that narrow or widen a parent's capabilities.

        A dict changes a record in part, ``server={"takes_out": True}``, and a set only the modes of ``windows``.
        """
        _refuse_moved(changes, lambda record, values: f"{{{_items(values)}}}")
        return super().with_changes(**changes)


_RECORDS: Mapping[str, type[Windows | ServerConventions]] = {"windows": Windows, "server": ServerConventions}
MOVED: Mapping[str, tuple[str, str]] = {
    "sliding_window": ("windows", "modes"),
    "min_window": ("windows", "smallest"),
    "layer_windows": ("windows", "layers"),
    "window_in_trees": ("windows", "in_trees"),
    "eager_waits": ("server", "eager_without_waits"),
    "waits_between_steps": ("server", "overlap_scheduling"),
    "drafts_without_prefix": ("server", "drafts_without_prefix"),
    "output_lifetime": ("server", "output_lifetime"),
    "padded_requests": ("server", "padded_requests"),
    "padding_slots": ("server", "padding_slots"),
    "takes_bare_chains": ("server", "takes_bare_chains"),
    "takes_empty_batches": ("server", "takes_empty_batches"),
    "takes_more_rows": ("server", "takes_more_rows"),
    "takes_none_kv": ("server", "takes_none_kv"),
    "takes_out": ("server", "takes_out"),
    "takes_strided_heads": ("server", "takes_strided_heads"),
    "takes_unset_width": ("server", "takes_unset_width"),
    "verify_lens": ("server", "verify_lens"),
}
"""Field of an earlier ``Capabilities`` -> the record that has it now, and its name there."""
_TURNED = ("eager_waits", "waits_between_steps")
"""Old names of fields that were True if the new one is False."""


def _refuse_moved(given: Mapping[str, object], written: Callable[[str, dict[str, object]], str]) -> None:
    """Raise ``ValueError`` with the new spelling of all fields that have moved."""
    moved: dict[str, dict[str, object]] = {}
    for old in (name for name in given if name in MOVED):
        record, new = MOVED[old]
        moved.setdefault(record, {})[new] = not given[old] if old in _TURNED else given[old]
    if moved:
        old = " and ".join(f"Capabilities.{name}" for name in given if name in MOVED)
        new = ", ".join(f"{record}={written(record, values)}" for record, values in sorted(moved.items()))
        raise ValueError(f"{old} {'are' if ' and ' in old else 'is'} now {new}")


def _arguments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _items(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name!r}: {_value(value)}" for name, value in values.items())


def _value(value: object) -> str:
    """Source text as an author writes it: modes as plain strings."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        words = sorted(repr(getattr(each, "value", each)) for each in value)
        return f"{{{', '.join(words)}}}" if words else "()"
    return repr(value)
