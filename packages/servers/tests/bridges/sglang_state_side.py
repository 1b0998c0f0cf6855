"""Published bugs of recurrent states, put into SGLang's GDN and Mamba2 classes by the same lines for both kits.

    export PYTHONPATH=packages/servers/tests/bridges
    attn-testkit run --backend sglang_state_side:NothingCommitted --mode target-verify

Each replaces a method of SGLang's classes and hands on to it. Bugs 7 to 9 need snapshots and 17 slots that lie apart:
neither kit runs these classes with them, so they are left out. Importing this imports SGLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attn_testkit.contract import BackendContext
from attn_testkit_servers.bridges.sglang import backend_class

RIGHT: dict[str, Any] = {kind: backend_class(kind) for kind in ("gdn", "mamba2")}
# SGLang can be imported on a CPU only after the bridge has prepared it.
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (  # noqa: E402
    HybridLinearAttnBackend,
    Mamba2AttnBackend,
    MambaAttnBackendBase,
)
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend  # noqa: E402

Method = Callable[..., Any]
Wrong = Callable[[Method], Method]
_BLOCK, _DRAFT = 16, 2


@dataclass(frozen=True)
class Bug:
    """Methods to replace, where the bug shows, and in which of the two classes."""

    number: int
    """In I.11."""
    thread: str
    mode: str
    execution: str
    kind: str
    replaced: tuple[tuple[type, str, Wrong], ...]
    case: str = ""
    """The case of this kit's tier core in which it shows; empty: it shows in tier smoke."""


def _planned(change: Callable[[Any, Any], None]) -> Wrong:
    """Change the metadata of an eager plan."""

    def wrong(right: Method) -> Method:
        def init_forward_metadata(self: Any, batch: Any) -> None:
            right(self, batch)
            change(self.forward_metadata, batch)

        return init_forward_metadata

    return wrong


def _clamped(right: Method) -> Method:
    def out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        right(self, batch, in_capture=in_capture)
        if not in_capture:
            self.forward_metadata.mamba_cache_indices.clamp_(min=0)

    return out_graph


def _stale_tail(right: Method) -> Method:
    def out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        lists = self.state_indices_list
        had = lists[batch.batch_size - 1].clone() if lists else None
        right(self, batch, in_capture=in_capture)
        if not in_capture and had is not None:
            held = self.forward_metadata.mamba_cache_indices
            held.copy_(torch.where(held < 0, had[: len(held)], held))

    return out_graph


def _stale_when_idle(right: Method) -> Method:
    def out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        lists = self.state_indices_list
        had = lists[batch.batch_size - 1].clone() if lists else None
        right(self, batch, in_capture=in_capture)
        if not in_capture and had is not None:
            held = self.forward_metadata.mamba_cache_indices
            held.copy_(torch.where((held < 0).all(), had[: len(held)], held))

    return out_graph


def _first_slot(metadata: Any, batch: Any) -> None:
    held = metadata.mamba_cache_indices
    metadata.mamba_cache_indices = torch.where(held == 1, -1, held)


def _with_prefix(begun: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Plan as if requests had a prefix where ``begun``, of [bs] rows, says so."""

    def wrong(right: Method) -> Method:
        def init_forward_metadata(self: Any, batch: Any) -> None:
            had = batch.extend_prefix_lens
            if had is not None:
                batch.extend_prefix_lens = torch.where(begun(batch.extend_seq_lens), had.clamp(min=1), had)
            try:
                right(self, batch)
            finally:
                batch.extend_prefix_lens = had

        return init_forward_metadata

    return wrong


def _of_layer(self: Any, layer_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
    return cache.conv[0], cache.temporal, self.forward_metadata.mamba_cache_indices.long().clamp(min=0)


def _window_cleared(right: Method) -> Method:
    def forward(self: Any, *given: Any, layer_id: int, forward_batch: Any, **more: Any) -> Any:
        if forward_batch.forward_mode.is_extend_without_speculative():
            conv, _, slots = _of_layer(self, layer_id)
            conv[slots[forward_batch.extend_prefix_lens == 0]] = 0
        return right(self, *given, layer_id=layer_id, forward_batch=forward_batch, **more)

    return forward


def _untracked(right: Method) -> Method:
    def convolve(self: Any, layer: Any, batch: Any, *rest: Any) -> Any:
        had, batch.extend_prefix_lens = batch.extend_prefix_lens, torch.zeros_like(batch.extend_prefix_lens)
        try:
            return right(self, layer, batch, *rest)
        finally:
            batch.extend_prefix_lens = had

    return convolve


def _kept(of: Callable[[Any, int], torch.Tensor], *, states: bool) -> Wrong:
    """Put back what the slots of requests ``of`` (batch, columns of a window) held before a prompt."""

    def wrong(right: Method) -> Method:
        def forward_extend(self: Any, layer: Any, forward_batch: Any, *given: Any, **more: Any) -> Any:
            if not forward_batch.forward_mode.is_extend_without_speculative():
                return right(self, layer, forward_batch, *given, **more)
            conv, temporal, slots = _of_layer(self, layer.layer_id)
            slots = slots[of(forward_batch, conv.shape[-1])]
            had = conv[slots].clone(), temporal[slots].clone()
            out = right(self, layer, forward_batch, *given, **more)
            conv[slots] = had[0]
            if states:
                temporal[slots] = had[1]
            return out

        return forward_extend

    return wrong


def _across_blocks(right: Method) -> Method:
    def forward_extend(self: Any, layer: Any, forward_batch: Any, *given: Any, **more: Any) -> Any:
        if forward_batch.forward_mode.is_extend_without_speculative():
            _, temporal, slots = _of_layer(self, layer.layer_id)
            first, new = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
            temporal[slots[(first % _BLOCK > 0) & (first // _BLOCK != (first + new - 1) // _BLOCK)]] = 0
        return right(self, layer, forward_batch, *given, **more)

    return forward_extend


def _last_node_unwritten(right: Method) -> Method:
    def forward_extend(self: Any, layer: Any, forward_batch: Any, *given: Any, **more: Any) -> Any:
        if not forward_batch.forward_mode.is_target_verify():
            return right(self, layer, forward_batch, *given, **more)
        scratch = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id).intermediate_ssm
        had = scratch[:, -1].clone()
        out = right(self, layer, forward_batch, *given, **more)
        scratch[:, -1] = had
        return out

    return forward_extend


def _not_committed(right: Method) -> Method:
    return lambda self, *given, **more: None


def _windows_after_commit(keep: bool) -> Wrong:
    """``keep``: windows stay as the verify left them; else they are those behind the root."""

    def wrong(right: Method) -> Method:
        def commit(self: Any, last_correct_step_indices: torch.Tensor, **more: Any) -> None:
            held = self.linear_attn_backend.req_to_token_pool.mamba_pool.mamba_cache.conv[0]
            states = self.linear_attn_backend.req_to_token_pool.mamba_pool.mamba_cache.temporal
            before = held.clone()
            right(self, last_correct_step_indices=last_correct_step_indices, **more)
            if keep:
                held.copy_(before)
                return
            after = states.clone()
            right(self, last_correct_step_indices=last_correct_step_indices.clamp(max=0), **more)
            states.copy_(after)

        return commit

    return wrong


def _scratch_by_slot(right: Method) -> Method:
    def commit(self: Any, last_correct_step_indices: torch.Tensor, **more: Any) -> None:
        linear = self.linear_attn_backend
        held = linear.req_to_token_pool.mamba_pool.mamba_cache.intermediate_ssm
        count = len(last_correct_step_indices)
        slots = linear.forward_metadata.mamba_cache_indices[:count].long().clamp(min=0) % held.shape[1]
        had = held[:, :count].clone()
        held[:, :count] = held[:, slots]
        right(self, last_correct_step_indices=last_correct_step_indices, **more)
        held[:, :count] = had

    return commit


_PLAN, _OUT, _COMMIT = (
    "init_forward_metadata", "init_forward_metadata_out_graph", "update_mamba_state_after_mtp_verify",
)  # fmt: skip


def _all(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(rows, dtype=torch.bool)


def _commit(number: int, thread: str, wrong: Wrong) -> Bug:
    return Bug(number, thread, "target-verify", "eager", "gdn", ((HybridLinearAttnBackend, _COMMIT, wrong),))


def _extend(number: int, thread: str, name: str, wrong: Wrong) -> Bug:
    return Bug(number, thread, "extend", "eager", "gdn", ((GDNAttnBackend, name, wrong),))


BUGS = {
    "PaddingClamped": Bug(
        1, "tokenspeed #700", "decode", "graph", "gdn", ((MambaAttnBackendBase, _OUT, _clamped),)
    ),
    "FirstSlotIsPadding": Bug(
        2, "weicj/vLLM-2080Ti-Definitive #93", "decode", "eager", "gdn",
        ((MambaAttnBackendBase, _PLAN, _planned(_first_slot)),),
    ),
    "StaleTail": Bug(
        3, "vllm-ascend #12040", "decode", "graph", "gdn", ((MambaAttnBackendBase, _OUT, _stale_tail),)
    ),
    "FirstTokenIsADecode": Bug(
        4, "vLLM #51562", "extend", "eager", "mamba2",
        ((Mamba2AttnBackend, _PLAN, _with_prefix(lambda rows: rows == 1)),),
    ),
    "FlagIgnored": Bug(
        5, "tpu-inference #2431", "extend", "eager", "mamba2", ((Mamba2AttnBackend, _PLAN, _with_prefix(_all)),)
    ),
    "PrefixHitsBeginFromZeros": _extend(6, "sglang #29368", "_convolve_prefill", _untracked),
    "NothingCommitted": _commit(10, "sglang #26351", _not_committed),
    "WindowBehindTheRoot": _commit(11, "vLLM #40738", _windows_after_commit(keep=False)),
    "PromptsOfADraftNotStored": _extend(
        12, "vLLM #49918", "forward_extend", _kept(lambda batch, width: batch.extend_seq_lens == _DRAFT, states=True)
    ),
    "ShortPromptsKeepTheWindow": _extend(
        13, "vLLM #56196", "forward_extend", _kept(lambda batch, width: batch.extend_seq_lens < width, states=False)
    ),
    "IdleReplaysKeepTheSlots": Bug(
        14, "vllm-ascend #10901", "decode", "graph", "gdn", ((MambaAttnBackendBase, _OUT, _stale_when_idle),),
        "decode-gdn2x2-d64-bf16-p16-k9.7.1-shuffled-mild_decay-k64w4s32.zeroed-b4prod-empty_batches",
    ),
    "BlocksBeginFromZeros": _extend(15, "syv-ai/qwen38-27b-rtx3090 #43", "forward_extend", _across_blocks),
    "ResumedKeepsItsState": Bug(
        16, "vllm-metal #488", "extend", "eager", "mamba2",
        ((Mamba2AttnBackend, _PLAN, _with_prefix(_all)), (Mamba2AttnBackend, "forward", _window_cleared)),
    ),
    "LastNodeUnwritten": Bug(
        18, "Avarok atlas #604", "target-verify", "eager", "gdn",
        ((GDNAttnBackend, "forward_extend", _last_node_unwritten),),
    ),
    "WindowNotRolledBack": _commit(19, "mlx-swift-lm #218", _windows_after_commit(keep=True)),
    "ScratchBySlot": _commit(20, "sglang #26829", _scratch_by_slot),
}  # fmt: skip
"""Name of a class of this module -> its bug."""


@contextlib.contextmanager
def put_in(bug: Bug) -> Iterator[None]:
    """SGLang's classes have the bug."""
    with contextlib.ExitStack() as stack:
        for owner, name, wrong in bug.replaced:
            was, right = vars(owner).get(name), getattr(owner, name)
            setattr(owner, name, wrong(right))
            if was is None:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, was)
        yield


def _with(bug: Bug) -> type:
    class Wrong(RIGHT[bug.kind]):  # type: ignore[misc]
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            if "held" not in vars(Wrong):
                # Of the whole process, which runs nothing else; a context manager that is freed would undo it.
                Wrong.held = put_in(bug)  # type: ignore[attr-defined]
                Wrong.held.__enter__()  # type: ignore[attr-defined]

    return Wrong


globals().update({name: _with(bug) for name, bug in BUGS.items()})
