"""Sparse attention that a backend supports: each row attends to the keys that an indexer selected for it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared, is_whole, spelled
from .refusal import Refusal

__all__ = ["INDEX_ROTATIONS", "INDEX_SCALES", "INDEX_SPACES", "INDEX_SUMS", "SELECTING_FORWARDS", "Indexer", "Sparse"]

INDEX_SPACES = ("positions", "slots", "pages")
INDEX_SCALES = ("amax", "power_of_two")
INDEX_ROTATIONS = ("none", "neox", "interleaved")
SELECTING_FORWARDS = ("each", "first")
INDEX_SUMS = {"float32": 2.0**-24, "fp22": 2.0**-13}
"""Sums of products -> their unit of rounding."""


@dataclass(frozen=True)
class Indexer(Declared):
    """The indexer of a backend, which selects the keys: ``Sparse(topk={2048}, indexer=Indexer(heads={64}))``.

    Such a backend has ``store_index`` and ``select`` (``AttentionBackend``), and ``context.index_pool``. The kit tests
    its ``forward`` with selections of the kit too, as without an indexer.

    Raises ``ValueError`` for a wrong spelling, and for no ``heads``.
    """

    heads: Set[int]
    """Which numbers of query heads may the indexer have? There is no default. DeepSeek V3.2 has 64."""
    scale: str = "amax"
    """How is a key's scale computed? Default, ``amax``: its largest magnitude over 448. ``power_of_two``: that
    quotient, rounded up to a power of two (UE8M0)."""
    reuses_selections: bool = False
    """May a layer use the selection of a layer before it? It has no index keys then (``index_topk_freq``). All layers
    between the two use that selection, too."""
    drafts: Set[str] = frozenset()
    """Which forwards of a draft-decode may select? Default, none: a draft attends to keys that an earlier step
    selected, as in SGLang since #29787. ``each``: every forward stores its index keys and selects. ``first``: only the
    first one does. Later forwards attend to the keys that it selected, so they see no token that the draft added later
    (``index_share_for_mtp_iteration``: vLLM #44420, TensorRT-LLM #15806). Only drafts of one branch have an indexer."""
    replicated: bool = False
    """May the instance be a rank of decode context parallelism (``LogSumExp.ranks``)? Then each rank stores the index
    keys of all tokens in an index pool of its own (``BackendContext.index_req_to_token``), and selects for itself."""
    sums: str = "float32"
    """How are products of FP8 numbers summed? Default, ``float32``. ``fp22``: with 13 bits of mantissa, as tensor cores
    of SM90 do. It widens the margin of scores that are not whole numbers."""
    rotates: str = "none"
    """Does the backend rotate index queries and keys, and quantize the queries, in one kernel (``fused_indexer_q`` of
    vLLM, ``indexer_qk_rope_quant_and_cache`` of aiter)? Default, ``none``: both are rotated, and queries are FP8.
    ``neox``: ``q_index`` [T, heads, 128] has the model's dtype. Numbers i and i + 32 of each query and key are a pair
    (x, y), for i below 32, which becomes (x cos - y sin, y cos + x sin). The cosines and sines of a position are in
    ``BackendContext.index_rope``. ``interleaved``: numbers 2 i and 2 i + 1 are such a pair. A query is quantized by
    the rule of ``scale``, and its weight is multiplied by its scale."""
    fused: bool = False
    """Is the indexer a part of ``forward``? Then ``forward`` gets ``q_index``, ``index_weights`` and ``k_index`` by
    name, no ``selected``, and neither ``store_index`` nor ``select`` is called."""

    def _check(self) -> None:
        heads = self._listed("heads")
        if not heads or not all(is_whole(each) and each >= 1 for each in heads):
            raise ValueError(
                f"Indexer.heads must be one or more whole numbers from 1 on, got {sorted(map(str, heads))}"
            )
        self._set("heads", frozenset(heads))
        spelled("scale", self.scale, INDEX_SCALES)
        self._check_words("drafts", SELECTING_FORWARDS)
        spelled("rotates", self.rotates, INDEX_ROTATIONS)
        if self.rotates != "none" and (self.drafts or self.fused or self.replicated):
            raise ValueError(
                "Indexer.rotates excludes drafts, fused and replicated: no case combines them; leave these out"
            )
        if self.drafts and self.fused:
            raise ValueError(
                "Indexer.drafts excludes fused: forwards of a draft share a selection that select returned"
            )
        spelled("sums", self.sums, tuple(INDEX_SUMS))
        self._check_flags()


@dataclass(frozen=True)
class Sparse(Declared):
    """The selections that a backend supports: ``Capabilities(sparse=Sparse(topk={2048}, index_space="positions"))``.

    Every layer of such a backend gets ``selected``, [T, topk] int32 on the device, by name in each ``forward``; with
    ``per_kv_head`` it is [T, Hk, topk]. The keys of a row are listed in any order, each once; -1 means no key. A row of
    fewer keys than ``topk`` selects all that it may see. Each layer and each row has its own selection.

    Raises ``ValueError`` for a wrong spelling, and for no ``topk``.
    """

    topk: Set[int]
    """Widths of ``selected``. There is no default. DeepSeek V3.2 has 2048."""
    index_space: str = "positions"
    """Meaning of an index. ``positions``: a key's place in its request, 0 being the first, which the request
    table maps to a slot. ``slots``: a slot of the KV pool (the fused top-k of SGLang, ``PAGED``). ``pages``: a page of
    the KV pool, as in a page table; ``block`` is then the page size. Pages of a row are listed in the order of the
    request, so that the list can replace a page table (FlashInfer #3955, sglang-jax #1376)."""
    block: int = 1
    """How many keys does an index select? Default, 1: the key itself. B: keys ``B * i .. B * i + B - 1`` of the request
    (NSA, MoBA, quest), of which a row attends to those that it may see. ``topk`` then counts blocks, and a row lists
    the block that contains it; a causal row does not attend to the keys of that block that come after it."""
    without_own_block: bool = False
    """True if a row need not list the block that contains it, as in selections by score (quest). False: each row
    lists it."""
    per_kv_head: bool = False
    """True if each KV head selects for itself (NSA, MoBA, MiniMax-M3). Then ``selected`` is [T, Hk, topk], and query
    head h attends to the keys of KV head ``h // q_per_kv``. False: all heads of a row have one selection."""
    holes: bool = False
    """True if -1 may come before a key. False: every -1 of a row is after its last key."""
    empty_rows: bool = False
    """True if a live row may select no key; its output must be finite then. False: each live row selects one key or
    more."""
    fewer_rows: bool = False
    """True if ``selected`` may have fewer rows than ``q``. Other rows of ``q`` belong to no request: the layers around
    attention were padded, and the indexer was not (``ServerConventions.takes_more_rows``). Their output must be finite.
    False: it has one row for each of ``q``."""
    any_padding: bool = False
    """True if padded rows may hold any index, even a stale one. False: a padded row holds -1, or the keys
    of a live row."""
    indexer: Indexer | None = None
    """Indexer, if the backend selects keys too. Default: selections are given."""

    def _check(self) -> None:
        topk = self._listed("topk")
        if not topk or not all(is_whole(each) and each >= 1 for each in topk):
            raise ValueError(f"Sparse.topk must be one or more whole numbers from 1 on, got {sorted(map(str, topk))}")
        self._set("topk", frozenset(topk))
        spelled("index_space", self.index_space, INDEX_SPACES)
        if not isinstance(self.indexer, Indexer | None):
            raise ValueError(f"Sparse.indexer must be an Indexer, got {self.indexer!r}; write Indexer(heads={{64}})")
        if not is_whole(self.block) or self.block < 1:
            raise ValueError(f"Sparse.block must be a whole number from 1 on, got {self.block!r}")
        if self.block > 1 and (self.index_space == "slots" or self.empty_rows or self.indexer):
            raise ValueError(
                "Sparse.block above 1 needs index_space='positions' or 'pages', and excludes empty_rows and indexer: "
                "an index is a block of a request, or the page that holds it, and each row lists a block"
            )
        if self.index_space == "pages" and (self.block == 1 or self.holes):
            raise ValueError(
                "Sparse.index_space='pages' needs block, the page size, and excludes holes: pages of a row are listed "
                "in the order of the request, and every -1 is after them"
            )
        if self.without_own_block and self.block == 1:
            raise ValueError("Sparse.without_own_block needs block above 1; a row may leave out its own key anyway")
        if self.per_kv_head and self.indexer:
            raise ValueError("Sparse.per_kv_head excludes indexer: the kit's indexer makes one selection for a row")
        self._check_flags()


def refused_selections(sparse: Sparse | None, context: BackendContext) -> Iterator[Refusal]:
    """Selections of keys, and indexers of a context's layers, that are not declared."""
    topk, indexer = (sparse.topk, sparse.indexer) if sparse else ({0}, None)
    if not all(layer.topk in topk for layer in context.layers):
        yield "selected keys per row", ", ".join(str(layer.topk) for layer in context.layers)
    per_kv_head = sparse is not None and sparse.per_kv_head
    if not all(layer.selects_per_kv_head == per_kv_head for layer in context.layers if layer.topk):
        yield "selections of each KV head", ", ".join(str(layer.selects_per_kv_head) for layer in context.layers)
    if not _selects(indexer, context):
        yield "indexer with heads and reuse of", ", ".join(f"{each.index_heads}" for each in context.layers)


def _selects(indexer: Indexer | None, context: BackendContext) -> bool:
    if indexer is None:
        return not any(layer.index_heads or layer.reuses_selection for layer in context.layers)
    heads = indexer.heads if indexer.fused else indexer.heads | {0}
    reused = indexer.reuses_selections or not any(layer.reuses_selection for layer in context.layers)
    scale = context.index_pool is None or context.index_pool.scale == indexer.scale
    scale = scale and (context.index_pool is None or (context.index_rope is None) == (indexer.rotates == "none"))
    replicated = indexer.replicated or context.index_req_to_token is None
    return reused and scale and replicated and all(layer.index_heads in heads for layer in context.layers)
