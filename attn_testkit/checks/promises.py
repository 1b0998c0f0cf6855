"""The promises, as a table: what is promised, what usually breaks it, and where that was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PROMISES", "Promise"]


@dataclass(frozen=True)
class Promise:
    """One promise that the kit judges."""

    id: str
    promise: str
    cause: str
    """What usually breaks it: where to look first."""
    source: str
    """Real bugs of the kind."""


_TABLE = (
    Promise(
        "completes",
        "A claimed case runs: constructor, planning and every forward finish without an exception.",
        "An attribute that a replay view does not have, a shape that only full batches have, a missing kernel.",
        "sglang #26019, #32269; vLLM #41841",
    ),
    Promise(
        "output-contract",
        "The output has the live and padded rows of q, Hq * Dv values a row, the model's dtype, q's device.",
        "squeeze() where q has one row, an output buffer of the largest batch returned whole, float32 returned.",
        "lmdeploy #4302; flashinfer #2876",
    ),
    Promise(
        "matches-oracle",
        "Every real row of every layer call is within the computed limit of float64 attention.",
        "Lengths off by one, wrong page or slot, scale, mask, window or head mapping.",
        "sglang #26512; flashinfer #4059; lightllm #743",
    ),
    Promise(
        "mode-outputs",
        "The mode returns exactly its fields, for exactly its rows: see the table of modes.",
        "An attention output that is right in shape and wrong in row order; a buffer overwritten by the next layer.",
        "sglang #25002, #35546",
    ),
    Promise(
        "graph-matches-eager",
        "A replay gives what the backend's own eager run of the same batch gives.",
        "Another kernel, another split or another rounding under capture than in eager.",
        "sglang #26412; vLLM #25490",
    ),
    Promise(
        "finite",
        "No NaN or Inf in a real row, nor in a warm-up of a decode or verify graph.",
        "A softmax over nothing, a combine of splits that are all empty, a very negative logit.",
        "flashinfer #4401; sglang #26521",
    ),
    Promise(
        "output-written",
        "Every real output row is written: outputs start full of poison.",
        "An early exit for short requests, a grid that covers the capture batch only.",
        "lmdeploy #788; flashinfer #639",
    ),
    Promise(
        "reads-own-kv",
        "A result depends on the request's own keys alone: every other slot holds NaN, page tails and page 0 included.",
        "A load that is masked after the multiply (0 * NaN), a length rounded up to a page, page 0 read for padding.",
        "flash-attention #1745; sglang #32477; aiter #4245",
    ),
    Promise(
        "writes-own-kv",
        "Exactly the batch's slots (and page 0) change, and they hold the batch's K and V.",
        "A slot of -1 for padding, slots frozen at capture, K and V swapped, a scale that is missing or applied twice.",
        "vLLM #43810; TensorRT-LLM #17110; sglang #24243",
    ),
    Promise(
        "inputs-unchanged",
        "q, k, v, the batch's tensors and the request table are not modified.",
        "In-place scaling or rotation of q, advancing seq_lens in place, a padded batch written back.",
        "sglang #23037",
    ),
    Promise(
        "captures-cleanly",
        "Capture meets no host sync, no copy from pageable memory, and leaves no persistent tensor behind.",
        "int(lengths.max()), .tolist(), torch.tensor(list, device=...), a workspace allocated on first use.",
        "sglang #25489; aiter #5393",
    ),
    Promise(
        "replay-follows-batch",
        "Nothing of the capture-time batch leaks into a replay: lengths, widths, slots, mask, max length.",
        "A Python number baked into a kernel launch, a plan that is not redone, strides of another layout.",
        "sglang #21987, #27545; vLLM #42444; rtp-llm #378",
    ),
    Promise(
        "addresses-stable",
        "A graph reads and writes only memory that is still alive and the same.",
        "Metadata re-allocated at replay instead of filled in place, a workspace that grew or was freed.",
        "vLLM #35175, #46067; TensorRT-LLM #16319",
    ),
    Promise(
        "padding-inert",
        "Padded rows change no real row and no slot outside page 0, whatever they hold.",
        "Metadata built before padding, a negative prefix, statistics over the whole batch, stale tails.",
        "vLLM #57094, #28579; sglang #31270",
    ),
    Promise(
        "buckets-independent",
        "Graphs of several buckets and modes on one instance, eager steps between them, and another instance that "
        "plans meanwhile, do not disturb each other.",
        "One metadata object for all buckets, a workspace that the next capture replaces, a flag left by another mode, "
        "a planner's workspace that all instances of a process share.",
        "lmdeploy #4661; vLLM #48261; sglang #33920, #27193",
    ),
    Promise(
        "steps-independent",
        "An eager step gives the same whatever step ran on the instance before it.",
        "A plan or a table that is kept while a key looks the same, a buffer sized by the first batch.",
        "TensorRT-LLM #6163; vLLM #21525; LightLLM #1367",
    ),
    Promise(
        "no-host-lengths",
        "With needs_cpu_seq_lens false: CPU mirrors are None, and preparing a replay does not wait for the device.",
        "seq_lens.max().item(), .cpu() in a plan, a host list turned into a device tensor at each step.",
        "sglang #27689, #28765, #26824",
    ),
    Promise(
        "refuses-undeclared",
        "What is not claimed raises Unsupported in the constructor.",
        "A constructor that does not call super().__init__, or claims that are wider than the check.",
        "vllm-ascend #15503",
    ),
    Promise(
        "claims-honest",
        "Graph support that is claimed captures and replays; what works and is not claimed is told as a hint.",
        "A claim copied from another class.",
        "sglang #29858",
    ),
    Promise(
        "repeatable",
        "Where promised: the same batch gives the same bits each time.",
        "Atomic adds, a split count that depends on timing, a counter that is not reset.",
        "flash-attention 1a58058a; sglang #26412",
    ),
    Promise(
        "batch-invariant",
        "Where promised: a request gives the same bits whatever else is in the batch.",
        "A split count or tile size chosen from the batch.",
        "flash-attention #2450; aiter #4378",
    ),
)

PROMISES: Mapping[str, Promise] = {promise.id: promise for promise in _TABLE}
"""By id, in the order in which they are worth reading."""
