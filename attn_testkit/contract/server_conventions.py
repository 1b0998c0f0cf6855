"""Conventions in which servers differ: those that a backend takes, and those of its own server.

``SGLANG`` and ``VLLM`` are what SGLang 0.5.23 and vLLM 0.33.0 do, to each of their backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from .declared import Declared, is_whole, spelled

__all__ = ["DIALECTS", "SERVERS", "SGLANG", "VLLM", "Dialect", "ServerConventions"]

DIALECTS: Mapping[str, tuple[str, ...]] = {
    "padded_requests": ("rows", "nothing"),
    "verify_lens": ("prefix", "all"),
}
"""Field of a ``Dialect``, and of ``ServerConventions`` -> its values; the first is the usual one."""
OUTPUT_LIFETIMES = ("model", "layer")


@dataclass(frozen=True)
class ServerConventions(Declared):
    """The conventions of servers that a backend takes: ``Capabilities(server=ServerConventions(takes_out=True))``.

    More is wider: each further value of a set, and True, is a convention that is tried too. Closed by default, to what
    all servers do (and to SGLang's answer where they differ), but for the last three fields, which are open.
    ``VLLM`` and ``SGLANG`` are what one server does, and ``VLLM.with_changes(takes_none_kv=True)`` that and more.
    """

    padding_slots: Set[int] = frozenset({0})
    """Which KV slots may rows of padding have in a graph? Default, 0: they are stored in page 0, which is reserved. -1:
    they are not stored at all (vLLM). With both replays take turns. ``KVPool.set_kv_buffer`` takes no -1."""
    padded_requests: Set[str] = frozenset({"rows"})
    """What may a padded request of a graph have? Default, ``rows``: as many as it was captured with. ``nothing``:
    neither rows nor keys (vLLM). See ``Dialect``, and ``BackendContext.dialect`` for which of several it is."""
    verify_lens: Set[str] = frozenset({"prefix"})
    """What may ``seq_lens`` count in target-verify? Default, ``prefix``: the keys before the step. ``all``: its new
    ones as well (vLLM). See ``Dialect``."""
    takes_none_kv: bool = False
    """With ``save_kv_cache`` False: may k and v be None? Servers pass None if the pool holds the new keys and values
    already. The first layer gets None then, and the others tensors of NaN, as all do by default."""
    takes_strided_heads: bool = False
    """May the heads of new k and v be strided? They are parts of [T, H, Dk + Dv] then, as where MLA is attended as MHA
    and one projection gives k and v of each head (``kv_b_proj``). By default the heads of a row lie one behind the
    other, as models split them off q, k and v of one projection, so that head h is at ``token * stride + h *
    head_dim``: rows may be strided, heads are not."""
    takes_unset_width: bool = False
    """May ``spec_info.num_tokens_per_req`` be 0 or -1 while a graph is captured, as servers up to mid-2026 had it? By
    default it is the width there too, as current servers give it."""
    takes_empty_batches: bool = False
    """May an eager batch have no request? Servers whose ranks take steps together plan such a batch, and every forward
    of it returns [0, Hq, Dv]; others leave it out, which is the default. A replay of a graph may have no live request
    whatever this says."""
    takes_bare_chains: bool = False
    """May a chain be verified without a tree, ``custom_mask`` and ``retrieve_*`` None? Draft methods that know no trees
    have it so: a row sees the prefix, the rows before it and itself. By default all of them are given."""
    takes_out: bool = False
    """Does ``forward`` take ``out=``, a contiguous [T, Hq, Dv] of the model's dtype that holds anything? Where it is
    given, the output is written there and ``out`` is returned. Another one comes with each call, or none. By default
    it is never given."""
    takes_more_rows: bool = False
    """May a forward have more rows than its plan? Servers pad a batch once it is planned, to sizes of the layers around
    attention. The batch of such a forward is another object than that of the plan: ``input_ids``, ``positions`` and
    ``out_cache_loc`` are longer, with a slot of padding. q, k, v and the output have as many rows; what the output
    holds in those behind the plan is ignored. Not in draft-decode. By default it has as many."""
    output_lifetime: str = "layer"
    """How long does an output hold what it held? Default, ``layer``: until the next ``forward`` of the instance, as
    where all layers share one buffer; the model reads it at once. ``model``: until every layer of the model has run."""
    drafts_without_prefix: bool = True
    """In draft-decode, may a request have no key before the draft? Servers draft behind a prefill, so theirs have one
    at least. Default: it may. False for planners that count on it."""
    eager_without_waits: bool = True
    """Do an eager plan and forward run without a wait for the device, where ``needs_cpu_seq_lens`` is False? Default: a
    wait there is a failure. False: they may wait, as SGLang's Triton class does where a layer has a window
    (``update_sliding_window_buffer``)."""
    overlap_scheduling: bool = True
    """May the server plan the next step while the device has not begun with this one, copies from pinned memory
    included? Default: it may, as schedulers do that overlap the two. False: it waits for the device in between."""

    def __post_init__(self) -> None:
        slots = self._listed("padding_slots")
        if not slots or not all(is_whole(slot) and slot in (0, -1) for slot in slots):
            raise ValueError(f"ServerConventions.padding_slots must be {{0}}, {{-1}} or {{0, -1}}, got {slots}")
        self._set("padding_slots", frozenset(slots))
        for name, values in DIALECTS.items():
            self._check_words(name, values)
            if not getattr(self, name):
                raise ValueError(f"ServerConventions.{name} must be some of {', '.join(values)}, got none")
        spelled("output_lifetime", self.output_lifetime, OUTPUT_LIFETIMES)
        self._check_flags()

    @override
    def made_of(self, given: object) -> Self:
        """Convert a value as for every record; ``sglang`` and ``vllm`` are its presets."""
        return super().made_of(SERVERS[spelled("server", given, tuple(SERVERS))] if isinstance(given, str) else given)


SGLANG = ServerConventions(drafts_without_prefix=False)
"""SGLang 0.5.23, whose conventions are this kit's defaults, and whose drafts begin behind a prefill. Rows of padding
and idle ranks end in its layers (``RadixAttention``), and reach no backend."""
VLLM = ServerConventions(
    padding_slots=frozenset({-1}),
    padded_requests=frozenset({"nothing"}),
    verify_lens=frozenset({"all"}),
    takes_bare_chains=True,
    takes_out=True,
    takes_more_rows=True,
    output_lifetime="model",
    drafts_without_prefix=False,
)
"""vLLM 0.33.0: the place in its source of each value is in ``bridges/vllm/capabilities.py``."""
SERVERS: Mapping[str, ServerConventions] = {"sglang": SGLANG, "vllm": VLLM}
"""Name, as ``Capabilities(server="vllm")`` has it -> its conventions."""


@dataclass(frozen=True)
class Dialect:
    """The conventions of the server around one instance: one value of each field of the same name."""

    padded_requests: str = "rows"
    """Rows and keys of a padded request in a graph. ``rows``: as many rows as it was captured with, and the fill value
    as ``seq_lens`` (SGLang). ``nothing``: neither rows nor keys, whatever the fill value of the backend is; the batch
    has ``query_start_loc`` (vLLM). A graph is captured on requests that have rows either way."""
    verify_lens: str = "prefix"
    """``seq_lens`` of target-verify. ``prefix``: keys before the step (SGLang). ``all``: with its N new ones, in
    ``spec_info`` as well (vLLM). The cells of a FULL_MASK are laid out by prefixes either way."""
