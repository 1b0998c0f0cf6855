"""SGLang 0.5.23's batches for the kit's: eager, captured, and the view of a replay.

The objects are SGLang's own (``ForwardBatch``, ``EagleVerifyInput``, ``EagleDraftExtendInput``, ``EagleDraftInput``)
over the kit's tensors. A view is a namespace there too: ``build_replay_fb_view`` and its like make it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info as fbi
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput

from attn_testkit.contract import DraftDecodeInput, DraftExtendInput, ForwardBatch, ForwardMode, VerifyInput

from .classes import SAME_FIELDS

MODES = {
    ForwardMode.DECODE: fbi.ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY: fbi.ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND_V2: fbi.ForwardMode.DRAFT_EXTEND_V2,
    ForwardMode.EXTEND: fbi.ForwardMode.EXTEND,
    # 0.5.14 took the v1 worker out. What is left of it is eager: an ordinary extend of ragged lengths.
    ForwardMode.DRAFT_EXTEND: fbi.ForwardMode.EXTEND,
    # The steps of a multi-step backend are decodes with a spec_info.
    ForwardMode.DRAFT_DECODE: fbi.ForwardMode.DECODE,
}

_ABSENT = (
    "encoder_lens", "out_cache_loc_virtual", "kv_loc_cols", "max_seq_len_host", "max_seq_len_override",
    "out_cache_loc_dsv4", "origin_out_cache_loc", "mamba_track_indices", "lora_ids", "global_num_tokens_cpu",
)  # fmt: skip
"""Fields of a view that are None for the models that the kit has."""


def spec_of(spec: object, width: int) -> Any:
    """SGLang's ``spec_info`` over the kit's tensors. ``width``: rows per request, which runners give at capture too."""
    if isinstance(spec, VerifyInput):
        return EagleVerifyInput(
            draft_token=spec.draft_token, custom_mask=spec.custom_mask, positions=spec.positions,
            retrieve_index=spec.retrieve_index, retrieve_next_token=spec.retrieve_next_token,
            retrieve_next_sibling=spec.retrieve_next_sibling, retrieve_cum_len=None, spec_steps=spec.spec_steps,
            topk=spec.topk, draft_token_num=spec.draft_token_num, num_tokens_per_req=width,
            capture_hidden_mode=fbi.CaptureHiddenMode.FULL, seq_lens_sum=spec.seq_lens_sum,
            seq_lens_cpu=spec.seq_lens_cpu,
        )  # fmt: skip
    if isinstance(spec, DraftExtendInput):
        made = EagleDraftExtendInput(
            hidden_states=spec.hidden_states, num_correct_drafts=spec.num_correct_drafts,
            num_accept_tokens=spec.num_accept_tokens, num_accept_tokens_cpu=spec.num_accept_tokens_cpu,
            positions=spec.positions, num_tokens_per_req=width, select_index=spec.select_index,
        )  # fmt: skip
        # The graph runner of draft-extends sets both from outside.
        made.extend_seq_lens_tensor = spec.extend_seq_lens_tensor
        made.extend_seq_lens_cpu = spec.extend_seq_lens_cpu
        return made
    if isinstance(spec, DraftDecodeInput):
        return EagleDraftInput(num_tokens_per_req=spec.topk, capture_hidden_mode=fbi.CaptureHiddenMode.LAST)
    return None


def _batch(batch: ForwardBatch, width: int, algorithm: Any, forward: bool) -> Any:
    """SGLang's batch, without a plan of its KV slots. ``forward``: the batch of one forward of a draft, not of all."""
    made = fbi.ForwardBatch(
        forward_mode=MODES[batch.forward_mode], spec_info=spec_of(batch.spec_info, width), spec_algorithm=algorithm,
        capture_hidden_mode=fbi.CaptureHiddenMode.NULL, **{name: getattr(batch, name) for name in SAME_FIELDS},
    )  # fmt: skip
    if made.seq_lens_cpu is None and batch.extend_seq_lens_cpu is not None and batch.extend_prefix_lens_cpu is not None:
        # The scheduler makes an extend on the host: it has these, whatever a backend says that it needs.
        both = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        made.seq_lens_cpu = torch.tensor([prefix + new for prefix, new in both], dtype=torch.int64)
    spec = batch.spec_info
    if isinstance(spec, DraftExtendInput) and made.extend_seq_lens is None:
        # The graph runner of draft-extends gives its buffer of widths in the batch, too.
        made.extend_seq_lens, made.extend_seq_lens_cpu = spec.extend_seq_lens_tensor, spec.extend_seq_lens_cpu
    if isinstance(spec, DraftDecodeInput) and not forward:
        made.out_cache_loc = spec.out_cache_loc
    return made


def eager_batch(batch: ForwardBatch, width: int, runner: Any, forward: bool = False) -> Any:
    """The batch of an eager step, or of one forward of a draft, with its own plan, as its scheduler would give."""
    made = _batch(batch, width, runner.spec_algorithm, forward)
    translator = runner.kv_index_translator
    translator.own_plan(made).bind(made, translator)
    return made


def captured_batch(batch: ForwardBatch, width: int, runner: Any, forward: bool = False) -> Any:
    """The batch of a capture, over a graph runner's own buffers."""
    made = _batch(batch, width, runner.spec_algorithm, forward)
    runner.kv_index_translator.bind_runner_slots(made)
    return made


def replay_view(view: ForwardBatch, width: int, runner: Any) -> Any:
    """Argument of ``init_forward_metadata_out_graph`` that SGLang's graph runners make for a replay."""
    made = SimpleNamespace(**{**dict.fromkeys(_ABSENT), **vars(view)})
    made.forward_mode = MODES[view.forward_mode]
    if hasattr(view, "actual_forward_mode"):
        made.actual_forward_mode = made.forward_mode
    made.spec_info = spec_of(view.spec_info, width)
    if isinstance(view.spec_info, DraftDecodeInput):
        made.out_cache_loc = view.spec_info.out_cache_loc
    made.kv_loc_plan = runner.kv_index_translator.own_plan(made)
    return made
