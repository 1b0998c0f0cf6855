"""Every check: its id, its texts, its place in the order, and the checks that it silences. Front ends read it without
torch.

``checks/`` has the functions, which refer to a check by its id. A check without such a function is evaluated by a run,
by a comparison of runs, or by diagnosis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class Stage(IntEnum):
    """The stage that a case-run has reached."""

    STARTED = 0
    CONSTRUCTED = 1
    """The backend's constructor has returned."""
    OBSERVED = 2
    """One or more steps, eager or replayed, were observed and evaluated."""
    CAPTURED = 3
    """All graphs are captured."""
    REPLAYED = 4
    """One or more replays were observed and evaluated."""
    COMPLETED = 5
    """Everything that was planned happened."""


@dataclass(frozen=True)
class Check:
    """One property that the kit checks, with all texts about it."""

    id: str
    """The stable id: known-failures files and results name it."""
    text: str
    """The property that a backend must have."""
    cause: str
    """Usual causes of a failure, to look at first."""
    source: str
    """Real bugs of the kind."""
    how_to_read: str
    """Advice on reading its failure."""
    evaluated_from: Stage
    """The stage that a case-run must reach for the check to be evaluated at all."""
    place: int = 0
    """Place in the evaluation of a step, from 1, causes before consequences: the first finding is diagnosed and read.
    0: not evaluated in a step.
    """
    role: Literal["", "selection", "outputs", "cause"] = ""
    """``selection``: it checks an indexer. A failure silences the later ones of this role and those of ``outputs``.
    ``outputs``: it checks attention outputs. Diagnosis explains its failures, and they silence later failures.
    ``cause``: diagnosis reports wrong attention outputs under its id once their cause is known.
    """
    behind_outputs: bool = False
    """True if it is not evaluated when attention outputs are wrong, because its failure would follow from them."""
    against_eager: bool = False
    """True if it compares replays with eager runs, so that a mode declared only for graphs cannot be evaluated."""

    @property
    def words(self) -> dict[str, str]:
        """The texts of the check, for readers without the kit."""
        return {"text": self.text, "cause": self.cause, "source": self.source, "how_to_read": self.how_to_read}


_TABLE = (
    Check(
        "completes",
        "A declared case runs: constructor, planning and every forward finish without an exception.",
        "An attribute that the batch of a replay lacks, a shape that only full batches have, a missing kernel.",
        "sglang #26019, #32269; vLLM #41841",
        "The first line has the exception; `where` is the last line of its traceback in your code.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "output-contract",
        "The output has the live and padded rows of q, Hq * Dv values per row, the model's dtype and q's device.",
        "squeeze() of a single row, returning the whole output buffer of the largest batch, returning float32.",
        "lmdeploy #4302; flashinfer #2876",
        "Compare the shape, dtype or device in the headline with `Hq * Dv` values per row, in q's dtype.",
        evaluated_from=Stage.OBSERVED,
    ),
    Check(
        "matches-oracle",
        "Every real row of every layer call is within the computed limit of float64 attention.",
        "A length that is off by one; a wrong page, slot, scale, mask, window or head mapping.",
        "sglang #26512; flashinfer #4059; lightllm #743",
        "`attended` shows which KV tokens a wrong row attended to and which it should have. If they are the right "
        "ones, look at scale, soft cap, sinks and the mapping of heads.",
        evaluated_from=Stage.OBSERVED,
        place=13,
        role="outputs",
    ),
    Check(
        "finite",
        "No NaN or Inf in a real row, nor in a warm-up of a decode or verify graph.",
        "A softmax over no key, a combination of splits that are all empty, a very negative logit.",
        "flashinfer #4401; sglang #26521",
        "The NaN was computed, not read: an empty sum, or memory that was never written. The hint says which.",
        evaluated_from=Stage.OBSERVED,
        place=12,
        role="outputs",
    ),
    Check(
        "output-written",
        "Every real output row is written. Output memory is filled with poison before.",
        "An early exit for short requests, a grid that covers only the batch of the capture.",
        "lmdeploy #788; flashinfer #639",
        "The place in `where` still holds the poison: a grid that is too small, or an early exit.",
        evaluated_from=Stage.OBSERVED,
        place=11,
        role="outputs",
    ),
    Check(
        "keys-counted-once",
        "Every KV token that a row may see counts exactly once in its output, and no other token counts, to within "
        "half a token at any length.",
        "A key at the edge of a split, tile or page that no split or two splits cover; a page of another request.",
        "flashinfer #1206; sglang #26512",
        "The headline names the KV tokens; they follow from this one output. With ordinary values, one token of "
        "thousands changes a result by less than a rounding. Here values are codes of +1 and -1 that nearly cancel, "
        "and their product with the error shows how often each token was counted.",
        evaluated_from=Stage.OBSERVED,
        place=14,
        role="outputs",
        behind_outputs=True,
    ),
    Check(
        "log-sum-exp",
        "If declared: the log-sum-exp of every row and head, for each KV split, is within its own computed limit, "
        "and -inf for a split without keys, whose output is finite.",
        "Base 2 instead of e, a transposed layout, a KV split without keys that gives 0 or NaN, a sink that is "
        "counted in every split, a log-sum-exp that is kept in bfloat16.",
        "sglang #35045, #40903, #22688; vLLM #22003; flashinfer #58",
        "`where` gives the value in natural units. The hint compares it with log-sum-exps of usual mistakes: "
        "another base, no sink or two, no scale, only the maximum.",
        evaluated_from=Stage.OBSERVED,
        place=10,
    ),
    Check(
        "mode-outputs",
        "The mode returns exactly its fields for exactly its rows: see the table of modes.",
        "An attention output with the right shape and the wrong row order; a buffer that the next layer overwrites.",
        "sglang #25002, #35546",
        "The attention of every layer is right. Look at what runs after it: pruning to the accepted row, tensors of "
        "the batch, buffers that a later layer shares.",
        evaluated_from=Stage.OBSERVED,
        place=18,
        behind_outputs=True,
    ),
    Check(
        "reads-own-kv",
        "A result depends only on the request's own KV tokens: every other slot holds NaN, page tails and page 0 "
        "included.",
        "A load that is masked after the multiplication (0 * NaN), a length rounded up to a page, page 0 read for "
        "padding.",
        "flash-attention #1745; sglang #32477; aiter #4245",
        "With zeros in unowned slots the result is finite. `attended` shows which foreign slots had weight; if the KV "
        "tokens are right, something is multiplied by 0 instead of masked.",
        evaluated_from=Stage.OBSERVED,
        role="cause",
        behind_outputs=True,
    ),
    Check(
        "writes-own-kv",
        "Only the batch's slots (and page 0) change, and they hold the batch's K and V. Memory between slots does not "
        "change.",
        "A slot of -1 for padding, slots fixed at capture, K and V swapped, a scale that is missing or applied twice.",
        "vLLM #43810; TensorRT-LLM #17110; sglang #24243",
        "`where` names the slot, its page and its owner. Unowned slots point to padding, earlier tokens to an "
        "offset, and this step's tokens to slots fixed at capture, wrong numbers, or padding stored over them.",
        evaluated_from=Stage.OBSERVED,
        place=6,
    ),
    Check(
        "received-as-sent",
        "Memory of requests that another instance hands over holds the sender's bits, and no other memory changes.",
        "Heads of another rank, channels of q, k and v cut as one row, a page taken for as many slots as here, a pool "
        "that is left out.",
        "sglang #23746, #19086; vLLM #37638",
        "`where` names the first wrong row and head, and `hint` says which row of the sender is there. The kit then "
        "puts the right rows in place, so all other checks judge the step as if nothing had been wrong.",
        evaluated_from=Stage.OBSERVED,
        place=1,
    ),
    Check(
        "reloaded-as-left",
        "Memory that leaves to the host is there bit for bit, and comes back so. No other memory changes.",
        "Copies that do not wait for the work that stores rows, strides of another host layout, pages counted as "
        "tokens, scales or index keys that are left behind.",
        "sglang #8915, #38217; vLLM #31341",
        "`where` names the first wrong row, and `hint` says which row is there. The kit then puts the right rows in "
        "place. If only outputs are wrong, a forward did not wait for the rows of its layer.",
        evaluated_from=Stage.OBSERVED,
        place=2,
    ),
    Check(
        "inputs-unchanged",
        "q, k, v, the batch's tensors, the request table and the memory around `out=` are not modified.",
        "In-place scaling or rotation of q, advancing seq_lens in place, a padded batch or a whole tile written back.",
        "sglang #23037",
        "`where` lists the tensors that changed.",
        evaluated_from=Stage.OBSERVED,
        place=20,
    ),
    Check(
        "memory-bounded",
        "Steps of the same shape do not take more device memory each time. Memory may grow to its largest size, and "
        "caches by shape may fill.",
        "A list or dict that keeps a tensor of every step, a plan that keeps its predecessor, scratch that is "
        "allocated again and not given back.",
        "vLLM #26142; flashinfer #2139",
        "`where` has the bytes per step, the backend's attribute that holds them, and in the emulation the line that "
        "allocated them.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "reads-own-state",
        "A result depends only on the request's own state. Slots of other requests hold NaN, and so does the slot of "
        "a fresh request if the backend reads has_initial_state.",
        "has_initial_state ignored, a first chunk of one token treated as a decode, a position in the batch used as "
        "a slot.",
        "vLLM #51562; tpu-inference #2431; vllm-metal #488",
        "With zeros in these slots the result is finite. `where` names the request. If it has no earlier state, the "
        "backend read its uninitialized slot.",
        evaluated_from=Stage.OBSERVED,
        role="cause",
        behind_outputs=True,
    ),
    Check(
        "writes-own-state",
        "Only slots of the batch change. Slot 0 changes only if padding may write it. Memory between slots does not "
        "change.",
        "An index of -1 clamped to 0, padded rows with stale slots, a stride that is a product of the shape.",
        "tokenspeed #700; vllm-ascend #12040, #10901; vLLM #56196",
        "The headline names the slot. Slot 0 points to padding; any other slot to a batch position or a table row "
        "that was used as a slot.",
        evaluated_from=Stage.OBSERVED,
        place=3,
    ),
    Check(
        "verify-keeps-state",
        "A target-verify leaves the state of each request as it was, bit for bit, until its commit.",
        "A kernel whose write-back is not switched off, a slot that is updated while the draft is not yet accepted.",
        "mlx-swift-lm #218; Avarok atlas #604",
        "States after draft nodes belong in pool.scratch. The headline names the request.",
        evaluated_from=Stage.OBSERVED,
        place=4,
    ),
    Check(
        "conv-window-exact",
        "The convolution window of each request holds its last W - 1 inputs afterwards, bit for bit. After a commit "
        "these end with the last accepted node.",
        "A prompt shorter than the window, a window that is not rolled back, columns in another order.",
        "vLLM #56196, #40738; mlx-swift-lm #218",
        "Windows are copies of inputs. `where` names the column; short requests keep columns of the window before.",
        evaluated_from=Stage.OBSERVED,
        place=16,
    ),
    Check(
        "state-matches-oracle",
        "The state of each request is within the computed limit of the float64 recurrence afterwards.",
        "A gate or decay of another token or head; a chunk that is lost; a state of another request.",
        "sglang #29368; vLLM-2080Ti-Definitive #93",
        "If outputs are right and the state is not, look at what is stored. The hint names states of others.",
        evaluated_from=Stage.OBSERVED,
        place=15,
        behind_outputs=True,
    ),
    Check(
        "state-counts-tokens",
        "On exact data each token of a step is in the state of its request once, in order, at any length.",
        "A last chunk that is lost, a token that is applied twice, a rejected draft token that is kept.",
        "sglang #26351; vLLM #49918",
        "The headline names the token: values of tokens are columns of the state, so nothing is hidden by decay.",
        evaluated_from=Stage.OBSERVED,
        place=5,
    ),
    Check(
        "state-rounding",
        "A decode that rounds its states stochastically stores the number below or above the exact value, each as "
        "often as it is near, with new random numbers for each element and step.",
        "A seed that a graph freezes at its capture, an offset that leaves out the row, a rounding that adds a half.",
        "sglang #26929; vLLM #35753; flashinfer #2645",
        "`where` has the measured value and the limit, which follows from the variance of a fair rounding.",
        evaluated_from=Stage.OBSERVED,
        place=16,
    ),
    Check(
        "index-stored",
        "The index pool holds the FP8 key and the scale of each token of the step, and no other byte of it changes.",
        "A page written token by token, scale views of all layers that alias, padded rows stored over live ones.",
        "ROCm/ATOM #1466; 1Cat-vLLM #250; sglang #31218",
        "`where` names layer, token, slot and page. Compare your strides with `IndexPool`: 64 keys, then 64 scales.",
        evaluated_from=Stage.OBSERVED,
        place=7,
        role="selection",
    ),
    Check(
        "selection-well-formed",
        "Each row selects min(topk, keys that it may see) different keys, and has -1 in all other columns.",
        "Stale indices after the count, lengths of padded rows, a result that is not filled with -1.",
        "DeepSeek-v4-Flash-DGX-Spark #2; vLLM #51538; flashinfer #5015",
        "`where` names layer, request, row and column. If only replays are wrong, look at lengths that a plan keeps.",
        evaluated_from=Stage.OBSERVED,
        place=8,
        role="selection",
    ),
    Check(
        "selects-best",
        "No key that a row leaves out has a higher score than one that it selects, apart from computed rounding.",
        "Scores of 0, ReLU or the scale left out, top-k and length that are swapped, scores of another row or layer.",
        "ROCm/ATOM #1466; mlx-lm #1454; antirez/ds4 #358",
        "The headline names a key that is selected and a better one that is not. Short contexts cannot show it: there "
        "all keys are selected.",
        evaluated_from=Stage.OBSERVED,
        place=9,
        role="selection",
    ),
    Check(
        "graph-matches-eager",
        "A replay gives the same as the backend's own eager run of the same batch.",
        "Another kernel, split or rounding under capture than in eager mode.",
        "sglang #26412; vLLM #25490",
        "Both results are within the limit, but they differ. Look for what depends on capture: a split count, a "
        "kernel choice, a "
        "rounding.",
        evaluated_from=Stage.COMPLETED,
        place=17,
        behind_outputs=True,
        against_eager=True,
    ),
    Check(
        "captures-cleanly",
        "Capture has no host sync and no copy from pageable memory, and leaves no persistent tensor behind. Its "
        "warm-ups write no KV slot outside page 0, and give the same bits if determinism is declared.",
        "int(lengths.max()), .tolist(), torch.tensor(list, device=...), a workspace allocated on first use, a counter "
        "that only a plan resets.",
        "sglang #25489; aiter #5393",
        "`where` is the line that a capture cannot record; the hint says what to write instead.",
        evaluated_from=Stage.CAPTURED,
        role="cause",
    ),
    Check(
        "replay-follows-batch",
        "A replay uses nothing of the batch it was captured with: lengths, widths, slots, mask, maximum length.",
        "A Python number fixed in a kernel launch, a plan that is not redone, strides of another layout.",
        "sglang #21987, #27545; vLLM #42444; rtp-llm #378",
        "Eager mode is correct. The hint says if the replay is right in a graph that was captured with the same batch: "
        "then the graph keeps a value of its capture. `attended` says which KV tokens were read.",
        evaluated_from=Stage.REPLAYED,
        role="cause",
        behind_outputs=True,
    ),
    Check(
        "addresses-stable",
        "A graph reads and writes only memory that still exists and was not replaced.",
        "Metadata that a replay re-allocates instead of filling in place, a workspace that grew or was freed.",
        "vLLM #35175, #46067; TensorRT-LLM #16319",
        "The hint names the attribute that a replay replaced, or the block that was freed. Allocate it once and "
        "fill it in place.",
        evaluated_from=Stage.REPLAYED,
        place=21,
        role="cause",
    ),
    Check(
        "padding-inert",
        "Padded rows, whatever they contain, change no real row and no slot outside page 0.",
        "Metadata built before padding, a negative prefix, statistics over the whole batch, stale tails.",
        "vLLM #57094, #28579; sglang #31270",
        "Without padding the result is right. Look for sums, maxima and tails over the padded batch.",
        evaluated_from=Stage.COMPLETED,
        role="cause",
        behind_outputs=True,
    ),
    Check(
        "padding-finite",
        "If declared: output rows of no request hold neither NaN nor Inf if their inputs are finite.",
        "A softmax over no key, splits that are all empty, rows after the last request that no program writes.",
        "vLLM #57094",
        "Live rows are right. A server that quantizes all rows with one scale spreads the NaN to every request.",
        evaluated_from=Stage.REPLAYED,
        place=19,
        behind_outputs=True,
    ),
    Check(
        "buckets-independent",
        "Graphs of several buckets and modes on one instance, eager steps between them, and a co-resident instance "
        "do not disturb each other.",
        "One metadata object for all buckets, a workspace that the next capture replaces, a flag left by another "
        "mode, a planner's workspace that all instances of a process share.",
        "lmdeploy #4661; vLLM #48261; sglang #33920, #27193",
        "The step is right as the only replay of the only bucket. Look for what two graphs, two modes or an eager step "
        "share.",
        evaluated_from=Stage.COMPLETED,
        role="cause",
        behind_outputs=True,
    ),
    Check(
        "steps-independent",
        "An eager step gives the same result whatever ran on the instance before it, and whatever a co-resident "
        "instance does meanwhile.",
        "A plan or table that is reused because its key looks the same, a buffer sized by the first batch, a buffer or "
        "constant that all instances of a process share.",
        "TensorRT-LLM #6163; vLLM #21525; LightLLM #1367",
        "The step is right as the first of a fresh instance. Look for state that survives a step: a cached plan or "
        "table whose cache key omits something, or, with a second instance in the process, a global.",
        evaluated_from=Stage.COMPLETED,
        role="cause",
        behind_outputs=True,
    ),
    Check(
        "leaves-process-alone",
        "A backend leaves the process as it found it: default dtype and device, grad mode, deterministic flags, seeds, "
        "environment, current directory, warnings filters, signal handlers, modes that were entered, functions of "
        "torch and of the kit, threads and child processes. Drawing random numbers is fine, seeding is not.",
        "torch.set_default_dtype or torch.manual_seed in a constructor, an environment variable set for a compiler, "
        "a torch function replaced to work around a bug, a helper thread that outlives its instance.",
        "general",
        "`where` names what changed, from what to what. Set it in a `with` block, or pass what you need as an "
        "argument: the server and other backends share the process. Effects of a package's first import, pools that "
        "compile kernels, threads of other packages, and variables of compilers (`TRITON_`, `CUDA_`, ...) are not "
        "reported.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "no-host-lengths",
        "If needs.cpu_seq_lens is False, host copies of lengths are None, and neither a plan nor an eager forward "
        "waits for the device.",
        "seq_lens.max().item() or .cpu() in a plan, a host list that becomes a device tensor at each step.",
        "sglang #27689, #28765, #26824",
        "`where` is the line that waits for the device, or that reads a host length which is None.",
        evaluated_from=Stage.REPLAYED,
    ),
    Check(
        "compiles-once",
        "Kernels are compiled and tuned once for a model and its batches, and not again for every length of a request.",
        "torch.compile(dynamic=False) on a tensor as long as the longest request, a length among a tuner's keys.",
        "vLLM #27178; pytorch #141486; torchtitan #3898",
        "`where` is what was compiled again in several steps, and the hint is torch's reason.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "capabilities-honest",
        "Declared graph support captures and replays. Graph support that works and is not declared is reported as a "
        "hint.",
        "A capability copied from another class.",
        "sglang #29858",
        "A declared capability that does not hold, or that no case can satisfy together with the others.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "refuses-undeclared",
        "The constructor raises Unsupported for everything that the backend does not declare.",
        "A constructor that does not call super().__init__, or capabilities wider than its own check.",
        "vllm-ascend #15503",
        "The constructor accepted an undeclared context. Call `super().__init__`, or declare the capability to have "
        "it tested.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "repeatable",
        "If declared: the same batch gives the same bits each time, in outputs and states, and selects the same keys.",
        "Atomic adds, a split count that depends on timing, a counter that is not reset, ties broken by arrival.",
        "flash-attention 1a58058a; sglang #26412; aiter #4376",
        "The same step ran twice on one instance: look for dirty counters, atomics, memory that is not cleared.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "batch-invariant",
        "If declared: a request gives the same bits, in outputs and states, and selects the same keys in any batch.",
        "A split count or tile size that depends on the batch.",
        "flash-attention #2450; aiter #4378; pegainfer #623",
        "Every request ran again, one by itself and the others in twos, fours and eights: look for kernels, sizes and"
        " splits that depend on the batch.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "mode-invariant",
        "If declared: a row of decode or of a verified chain gives the same bits as a row of extend with its keys, in "
        "eager mode and in replays.",
        "Another kernel for verify, a split count of decode only or by the bucket of a graph, tiles by the rows of a "
        "request.",
        "general; servers that train on what they generate",
        "The last rows of an eager extend ran again in decode and as a chain, on the same instance and in the same "
        "slots, and were replayed where these modes have graphs: look for what depends on the mode, on the rows of a "
        "request or on the capture.",
        evaluated_from=Stage.COMPLETED,
    ),
    Check(
        "lossless",
        "Draft-decode, target-verify and draft-extend, or decode, target-verify and commit, round after round on one "
        "instance, generate the tokens of plain greedy decode, whatever is accepted of a draft.",
        "A value cached in one stage is reused in the next, or rejected draft tokens are still visible or part of a "
        "state.",
        "sglang #21987; vLLM #43810",
        "`step` names the first round and stage that differ.",
        evaluated_from=Stage.COMPLETED,
    ),
)

CHECKS: Mapping[str, Check] = {check.id: check for check in _TABLE}
"""Checks by id, in the order in which their failures are worth reading."""

IN_A_STEP: tuple[Check, ...] = tuple(sorted((check for check in _TABLE if check.place), key=lambda check: check.place))
"""Checks that are evaluated in each step, in the order of evaluation."""


def _of_role(role: str) -> tuple[str, ...]:
    return tuple(check.id for check in sorted(_TABLE, key=lambda check: check.place) if check.role == role)


NUMERIC = _of_role("outputs")
"""Ids of the checks of attention outputs."""
BEFORE_OUTPUTS = _of_role("selection")
"""Ids of the checks of an indexer, in order."""
REPORTED_INSTEAD = _of_role("cause")
"""Ids under which diagnosis reports wrong attention outputs once their cause is known."""
