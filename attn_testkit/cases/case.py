"""A case is data with a readable name, and the name alone rebuilds it."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ..contract import KV_LAYOUTS, LAYER_WINDOWS, ForwardMode, HeadShape
from . import choices
from .draft import Draft
from .head_shapes import HeadMap, wrong_with_shapes
from .layers import LAYERS_WORD, PERIOD, Layers, read_layers
from .trees import Tree, chain

__all__ = ["CODES", "DATA", "EXTREME_DATA", "LAYOUTS", "PADDINGS", "WAYS", "Case", "Heads", "parse_case"]

LAYOUTS = ("contiguous", "shuffled", "interleaved", "reversed", "shared")
"""How a request's tokens lie in the KV pool. ``reversed``: pages descend inside a request (non-monotonic slots).
``shared``: requests have the whole pages that their prefixes have in common, as after a hit in a prefix cache."""
DATA = ("gauss", "shifted", "peaked", "negative", "mean", "footprint", "cliff")
"""Data patterns; see ``cases/patterns.py``."""
EXTREME_DATA = ("saturated", "swamped", "loud", "large_and_small_queries", "towering", "colossal", "faint")
"""Those of a few cases alone, which show nothing but what they are for: see ``cases/extremes.py``."""
CODES = "codes"
"""That of a few cases too, which count keys: see ``cases/code_cases.py``."""
PADDINGS = ("prod", "nan", "stale", "small")
"""What fills the rows between live requests and the bucket; see ``cases/schedule.py``."""
WAYS = ("idle", "norows", "withnew", "bare", "lent", "morerows", "far", "noncausal", "shapes", "bigpool", "ahead")
"""What not every server does: see ``cases/ways/``, which has a file for each."""


@dataclass(frozen=True)
class Heads:
    """Head layout of one rank."""

    family: str
    """``mha``, ``gqa``, ``mqa`` or ``mla``."""
    q_heads: int
    kv_heads: int
    """A divisor of ``q_heads``: as many (mha), fewer (gqa), 1 (mqa, mla)."""

    def __str__(self) -> str:
        ratio = self.q_heads // self.kv_heads
        return f"gqa{ratio}x{self.kv_heads}" if self.family == "gqa" else f"{self.family}{self.q_heads}"


@dataclass(frozen=True)
class Case:
    """One thing to try. Lengths are in tokens; every tuple has one entry per request.

    Raises ``ValueError`` for a batch that is empty or larger than its bucket, accepted counts that are not one per
    request and 1 .. width, new tokens that are not one or more per request or more than their graph holds, chunks in
    another mode than extend, a tree in another mode than target-verify, or none there, a draft in another mode than
    draft-decode, or none there, a loop without a draft, with an FP8 pool, or with other layers than two from 0, parts
    that a draft cannot have, KV groups in draft-decode or beside parts or a way, layers that share a window where
    there is none, and MLA with the usual scaling; also for layers whose heads do not lie in those of the case
    (``cases/head_shapes.py``), which are of MLA, or which stand beside parts or a way.
    """

    mode: ForwardMode
    heads: Heads
    head_dim: int
    """Width of a value row (MLA: of the latent part)."""
    dtype: str
    """Of q, k, v and the output: ``fp16``, ``bf16`` or ``fp32``."""
    page_size: int
    """KV slots a page."""
    prefixes: tuple[int, ...]
    """Keys of each request before this step."""
    new: tuple[int, ...] = ()
    """Draft-extend: accepted tokens of each request, 1 .. width. Extend: new tokens of each. Empty elsewhere."""
    width: int = 1
    """Rows a request in the graph: 1, N (verify, v2) or S + 1 (v1). Extend: a graph of B requests has B times as many,
    and a step shares them out. Draft-decode: those of all forwards."""
    chunks: int = 1
    """Extend: steps in which the prompts of the own batch come; it is the first of them. 1 elsewhere."""
    rounds: int = 0
    """Draft-decode: rounds of a lossless loop (``cases/loop.py``), run beside the steps. 0 elsewhere."""
    tree: Tree | None = None
    """Target-verify: the draft tree, of ``width`` nodes. None elsewhere."""
    draft: Draft | None = None
    """Draft-decode: the branches, of ``width`` rows together. None elsewhere."""
    prefixed: bool = False
    """Draft-decode: no request of any step has an empty prefix."""
    layout: str = "shuffled"
    """One of ``LAYOUTS``."""
    data: str = "gauss"
    """One of ``DATA`` or ``EXTREME_DATA``, or ``CODES``."""
    rope_dim: int = 0
    """MLA: width of the part of a key that is no value. 0 elsewhere."""
    kv_dtype: str = "same"
    """Of the KV pool: ``same`` as ``dtype``, or ``fp8_e4m3``."""
    kv_layout: str = "nhd"
    """How the KV pool lies in memory: one of ``KV_LAYOUTS``."""
    window: int = -1
    """W of every second layer; the others have none, or a wider one: see ``make_layers``."""
    layer_windows: str = "any"
    """One of ``LAYER_WINDOWS``. ``one``: the others have none. ``same``: all layers have it. ``any`` without a
    window."""
    usual_scaling: bool = False
    """All layers have the scaling 1/sqrt(head_dim). Without it no two have the same, and none has that; MLA always is
    without."""
    logit_cap: float = 0.0
    """Soft cap of every second layer; 0.0: none."""
    sinks: bool = False
    """All layers have attention sinks, one logit a query head."""
    layers: Layers = field(default=Layers())
    """How many there are, under which ids, and whether they share a KV group."""
    parts: str = ""
    """Keys are attended in parts, each with its log-sum-exp: ``whole``, ``prefix`` for the prefix and the new rows,
    ``pagesR`` or ``tokensR`` for R ranks (``cases/parts.py``). Empty: they are not."""
    own_merge: bool = False
    """The backend merges the parts; otherwise the kit does."""
    bucket: int = 1
    """Batch size of the graph that the case's own batch runs in."""
    padding: str = "prod"
    """One of ``PADDINGS``."""
    mixed: bool = False
    """Graph drives of all claimed modes share one backend instance and run interleaved."""
    way: str = ""
    """One of ``WAYS``; empty: as all servers do it."""
    seed: int = 0
    """Other data, slots, schedule and choices for the same shapes."""
    host: Case | None = field(default=None, repr=False)
    """The mixed case whose backend instance, and so whose layers, this one shares. No word of the id, because only
    ``companions`` makes such a case, and the id of the host rebuilds it."""

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ValueError("a case needs at least one request")
        if self.bucket < len(self.prefixes):
            raise ValueError(f"bucket {self.bucket} is smaller than the batch of {len(self.prefixes)} requests")
        if self.mode is ForwardMode.EXTEND:
            self._check_new_tokens()
        elif self.new and (len(self.new) != len(self.prefixes) or not all(1 <= n <= self.width for n in self.new)):
            raise ValueError(f"accepted counts {self.new} must be one per request, each 1..{self.width}")
        if self.chunks < 1 or (self.chunks > 1 and self.mode is not ForwardMode.EXTEND):
            raise ValueError(f"{self.chunks} chunks: prompts come in one or more, and in extend alone")
        if (self.tree is not None) != (self.mode is ForwardMode.TARGET_VERIFY):
            raise ValueError("a tree goes with target-verify, and only with it")
        if (self.draft is not None) != (self.mode is ForwardMode.DRAFT_DECODE):
            raise ValueError("a draft goes with draft-decode, and only with it")
        if self.prefixed and (not self.draft or 0 in self.prefixes):
            raise ValueError(f"prefixed, with keys {self.prefixes}: in draft-decode alone, and one key or more of each")
        if self.rounds < 0 or (self.rounds and (not self.draft or self.kv_dtype != "same")):
            raise ValueError(f"{self.rounds} rounds: a loop goes with draft-decode, and a KV pool of the model's dtype")
        if self.own_merge and self.parts in ("", "whole"):
            raise ValueError("a backend merges parts, and the case has none")
        if self.parts and (self.mixed or self.rounds or (self.draft and self.parts != "whole")):
            raise ValueError(f"parts {self.parts!r}: of no mixed case and of no loop, and of a draft the whole alone")
        if self.rounds and self.layers != Layers():
            raise ValueError(f"{self.layers}: the model of a loop has two layers, from id 0 on")
        if self.layer_windows not in LAYER_WINDOWS or (self.layer_windows != "any" and self.window < 0):
            raise ValueError(
                f"layer_windows {self.layer_windows!r}: one of {LAYER_WINDOWS}, and 'any' without a window"
            )
        if self.usual_scaling and self.is_mla:
            raise ValueError("MLA has a scaling of its own, and never the usual one of its rows")
        if self.layers.groups and self.draft:
            raise ValueError(f"{self.layers}: in draft-decode all layers share one KV group")
        if self.layers.groups and (self.parts or self.way):
            beside = f"parts {self.parts!r}" if self.parts else f"way {self.way!r}"
            raise ValueError(f"{self.layers}: KV groups go neither with parts nor with a way, here {beside}")
        if self.layers.shapes:
            self._check_shapes()

    def _check_shapes(self) -> None:
        beside = "mla" if self.is_mla else self.parts or self.way
        if beside:
            raise ValueError(f"{self.layers}: heads that differ go neither with MLA, parts nor a way, here {beside!r}")
        wrong = wrong_with_shapes(self.head_shape, self.layers.shapes)
        if wrong:
            raise ValueError(f"{self.layers} in a case of {self.heads} and head dim {self.head_dim}: {wrong}")

    def _check_new_tokens(self) -> None:
        if len(self.new) != len(self.prefixes) or min(self.new) < 1:
            raise ValueError(f"new tokens {self.new} must be one or more per request")
        if sum(self.new) > self.bucket * self.width:
            raise ValueError(
                f"{sum(self.new)} new tokens are more than the {self.bucket} x {self.width} of their graph"
            )

    @property
    def head_shape(self) -> HeadShape:
        """What holds the heads of every layer: see ``cases/head_shapes.py``."""
        return HeadShape(self.heads.q_heads, self.heads.kv_heads, self.head_dim + self.rope_dim)

    @cached_property
    def head_maps(self) -> tuple[HeadMap, ...]:
        """Where the heads of each layer lie in ``head_shape``; empty where all layers have that."""
        shapes = self.layers.shapes
        return tuple(HeadMap(shapes[i % PERIOD], self.head_shape) for i in range(self.layers.count)) if shapes else ()

    @property
    def bs(self) -> int:
        """Live requests of the case's own batch."""
        return len(self.prefixes)

    @property
    def most_new(self) -> int:
        """Most rows of a request in any step."""
        return max(self.width, *self.new) if self.new else self.width

    @property
    def rows_at_once(self) -> int:
        """Rows a request in one forward of the model."""
        return self.draft.branches if self.draft else self.width

    @property
    def topk(self) -> int:
        """K of the draft tree; 0 without one."""
        return self.tree.topk if self.tree else 0

    @cached_property
    def id(self) -> str:
        """The name. ``parse_case`` turns it back into an equal case."""
        rope = f"r{self.rope_dim}" if self.rope_dim else ""
        words = [
            self.mode.value,
            str(self.heads),
            f"d{self.head_dim}{rope}",
            self.dtype,
            f"p{self.page_size}",
            "k" + _numbers(self.prefixes),
        ]
        if self.tree:
            n = len(self.tree)
            words.append(f"chain{n}" if self.tree == chain(n) else "t" + ".".join(map(str, self.tree.parents)))
        elif self.draft:
            words.append(f"topk{self.draft.branches}steps{self.draft.steps}")
            words += ["prefixed"] if self.prefixed else []
        elif self.mode is not ForwardMode.DECODE:
            words.append(f"n{self.width}a{_numbers(self.new)}")
        if self.rounds:
            words.append(f"loop{self.rounds}")
        if self.chunks > 1:
            words.append(f"chunks{self.chunks}")
        words += [self.layout, self.data]
        if self.kv_dtype != "same":
            words.append("kv" + self.kv_dtype.replace("_", ""))
        if self.kv_layout != "nhd":
            words.append(_layout_word(self.kv_layout))
        if self.window >= 0:
            words.append(f"w{self.window}{'' if self.layer_windows == 'any' else self.layer_windows}")
        if self.usual_scaling:
            words.append("usualscale")
        if self.logit_cap:
            words.append(f"cap{self.logit_cap:g}")
        if self.sinks:
            words.append("sink")
        if self.layers != Layers():
            words.append(str(self.layers))
        if self.parts:
            words.append(f"lse{self.parts}{'own' if self.own_merge else ''}")
        words.append(f"b{self.bucket}{self.padding}")
        if self.mixed:
            words.append("mixed")
        if self.way:
            words.append(self.way)
        if self.seed:
            words.append(f"s{self.seed}")
        return "-".join(words)

    @cached_property
    def digest(self) -> int:
        """Seed of everything random in the case: 64 bits from its id, the same on every machine.

        For data and slots alone; what a case decides comes from ``pick``.
        """
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "little")

    @property
    def is_mla(self) -> bool:
        """Whether v is a part of k."""
        return self.heads.family == "mla"

    @property
    def inference_mode(self) -> bool:
        """Whether it runs under ``torch.inference_mode`` or, as the other half does, under ``torch.no_grad``."""
        return self.pick("grad-mode") == 1

    @property
    def strided_heads(self) -> bool:
        """Whether the heads of new k and v are strided, for a backend that claims ``takes_strided_heads``."""
        return self.mode is ForwardMode.EXTEND and not self.is_mla and self.pick("kv-memory") == 1

    def pick(self, name: str, n: int | None = None) -> int:
        """The value 0 .. n - 1 of a choice of ``cases/choices.py``: a hash of the case's id and the choice's name.

        ``n`` comes from the table, and is passed for choices alone whose values the asker counts. Raises ``ValueError``
        for a name that the table lacks, a choice that does not apply to this case, and an ``n`` that is not the
        table's.
        """
        return choices.pick(self, name, n)

    def with_seed(self, seed: int) -> Case:
        """The same case with other random data, slots and schedule."""
        return replace(self, seed=seed)


def _numbers(values: tuple[int, ...]) -> str:
    """(5, 5, 9) -> ``5x2.9``."""
    parts: list[list[int]] = []
    for value in values:
        if parts and parts[-1][0] == value:
            parts[-1][1] += 1
        else:
            parts.append([value, 1])
    return ".".join(str(v) if n == 1 else f"{v}x{n}" for v, n in parts)


def _unnumbers(text: str) -> tuple[int, ...]:
    values: list[int] = []
    for part in text.split("."):
        value, _, times = part.partition("x")
        values += [int(value)] * int(times or 1)
    return tuple(values)


def _heads(match: re.Match[str]) -> dict[str, Any]:
    family, first, second = match["family"], int(match["first"]), match["second"]
    if family == "gqa":
        return {"heads": Heads("gqa", first * int(second or 1), int(second or 1))}
    return {"heads": Heads(family, first, first if family == "mha" else 1)}


def _tree(parents: tuple[int, ...]) -> dict[str, Any]:
    return {"tree": Tree(parents), "width": len(parents) + 1}


def _draft(draft: Draft) -> dict[str, Any]:
    return {"draft": draft, "width": len(draft)}


def _layout_word(name: str) -> str:
    return "kv" + name.removeprefix("kv").replace("-", "")


_KV_LAYOUTS = {_layout_word(name): name for name in KV_LAYOUTS if name != "nhd"}
_Word = tuple[str, Callable[[re.Match[str]], Mapping[str, Any]]]
_WORDS: tuple[_Word, ...] = (
    (r"(?P<family>mha|gqa|mqa|mla)(?P<first>\d+)(x(?P<second>\d+))?", _heads),
    (r"d(\d+)(?:r(\d+))?", lambda m: {"head_dim": int(m[1]), "rope_dim": int(m[2] or 0)}),
    (r"fp16|bf16|fp32", lambda m: {"dtype": m[0]}),
    (r"p(\d+)", lambda m: {"page_size": int(m[1])}),
    (r"k([\d.x]+)", lambda m: {"prefixes": _unnumbers(m[1])}),
    (r"chain(\d+)", lambda m: _tree(chain(int(m[1])).parents)),
    (r"t(\d+(?:\.\d+)*)", lambda m: _tree(tuple(map(int, m[1].split("."))))),
    (r"topk(\d+)steps(\d+)", lambda m: _draft(Draft(int(m[1]), int(m[2])))),
    (r"prefixed", lambda m: {"prefixed": True}),
    (r"loop(\d+)", lambda m: {"rounds": int(m[1])}),
    (r"chunks(\d+)", lambda m: {"chunks": int(m[1])}),
    (r"n(\d+)a([\d.x]+)", lambda m: {"width": int(m[1]), "new": _unnumbers(m[2])}),
    ("|".join(LAYOUTS), lambda m: {"layout": m[0]}),
    ("|".join((*DATA, *EXTREME_DATA, CODES)), lambda m: {"data": m[0]}),
    (r"kvfp8e4m3", lambda m: {"kv_dtype": "fp8_e4m3"}),
    ("|".join(_KV_LAYOUTS), lambda m: {"kv_layout": _KV_LAYOUTS[m[0]]}),
    (r"w(\d+)(one|same)?", lambda m: {"window": int(m[1]), "layer_windows": m[2] or "any"}),
    (r"usualscale", lambda m: {"usual_scaling": True}),
    (r"cap([\d.]+)", lambda m: {"logit_cap": float(m[1])}),
    (r"sink", lambda m: {"sinks": True}),
    (LAYERS_WORD, read_layers),
    (
        r"lse(?:(whole)|(prefix|(?:pages|tokens)(?:[2-9]|[1-9]\d+))(own)?)",
        lambda m: {"parts": m[1] or m[2], "own_merge": bool(m[3])},
    ),
    (r"b(\d+)(" + "|".join(PADDINGS) + ")", lambda m: {"bucket": int(m[1]), "padding": m[2]}),
    (r"mixed", lambda m: {"mixed": True}),
    ("|".join(WAYS), lambda m: {"way": m[0]}),
    (r"s(\d+)", lambda m: {"seed": int(m[1])}),
)
_NEEDED = ("heads", "head_dim", "dtype", "page_size", "prefixes", "layout", "data", "bucket")


@lru_cache(maxsize=1 << 14)
def parse_case(case_id: str) -> Case:
    """Rebuild a case from its id. Raises ``ValueError`` that names the word it could not read."""
    modes = sorted((mode.value for mode in ForwardMode), key=len, reverse=True)
    mode = next((m for m in modes if case_id.startswith(m + "-")), None)
    if mode is None:
        close = difflib.get_close_matches(case_id.split("-")[0], modes, n=1, cutoff=0.3)
        hint = f" (did you mean {close[0]}-...?)" if close else ""
        raise ValueError(f"case id {case_id!r} does not begin with a mode: {', '.join(sorted(modes))}{hint}")
    values: dict[str, Any] = {"mode": ForwardMode(mode)}
    for word in case_id[len(mode) + 1 :].split("-"):
        found = next(((m, read) for p, read in _WORDS if (m := re.fullmatch(p, word))), None)
        if found is None:
            known = (
                *LAYOUTS, *DATA, *EXTREME_DATA, CODES, *_KV_LAYOUTS, *WAYS,
                "fp16", "bf16", "fp32", "sink", "usualscale", "prefixed",
            )  # fmt: skip
            close = difflib.get_close_matches(word, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"case id {case_id!r}: cannot read {word!r}{hint}")
        values.update(found[1](found[0]))
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise ValueError(f"case id {case_id!r} does not say: {', '.join(missing)}")
    case = Case(**values)
    if case.id != case_id:
        raise ValueError(f"case id {case_id!r} is not in its usual form; write {case.id}")
    return case
