"""Operations that CUDA refuses while a graph is being captured: one row per rule.

`measured` names the evidence of a row: the calibration snippets that show it (stored with device and torch version in
`packages/corpus/attn_testkit_corpus/calibrate/`), or "read" for rows taken from torch's CUDA sources without a
measurement. `syncs` says that the host waits for the device, which `torch.cuda.set_sync_debug_mode` reports outside of
captures too. `invalidates` says that the capture is lost even if the program catches the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu import conditions
from cuda_on_cpu.conditions import Call
from cuda_on_cpu.rule import (
    COPY_BEFORE,
    FIXED_SHAPE,
    KEEP_ON_DEVICE,
    NON_BLOCKING,
    NOT_PERMITTED,
    UNPINNED,
    Rule,
)

TO_HOST = Rule(
    "a copy to unpinned host memory",
    UNPINNED,
    KEEP_ON_DEVICE,
    (".cpu()", ".to(cpu)", "host.copy_(dev)", ".tolist()"),
    invalidates=False,
)
TO_DEVICE = Rule(
    "a copy from unpinned host memory",
    UNPINNED,
    COPY_BEFORE,
    ("host.to(dev)", "host.to(dev,nb)", "tensor(list,dev)", "new_tensor"),
    invalidates=False,
)
BLOCKING_COPY = Rule("a blocking copy", NOT_PERMITTED, NON_BLOCKING, ("pinned.to(dev)", "pinned.copy_(dev)"))
HOST_READ = Rule("the host reads device memory", NOT_PERMITTED, KEEP_ON_DEVICE, (".item()", "print"))
HOST_WAIT = Rule(
    "the host waits for the device",
    NOT_PERMITTED,
    "synchronise before the capture or after the replay",
    ("cuda.synchronize", "event.sync"),
    syncs=False,
    says_whom=True,
)
STREAM_WAIT = Rule(
    "the host waits for a stream",
    NOT_PERMITTED,
    "synchronise before the capture or after the replay",
    ("stream.sync",),
    says_whom=True,
)
UNREGISTERED_GENERATOR = Rule(
    "a generator that the graph does not know",
    "torch would refuse with 'Attempt to increase offset for a CUDA generator not in capture mode'",
    "call graph.register_generator_state(generator) before the capture",
    ("Generator",),
    syncs=False,
    invalidates=False,
)
MOVED_MEMORY = Rule(
    "resizing memory that the graph already uses",
    "the recorded kernels would keep the old address, which is freed",
    "allocate the largest size once, in the constructor, and use views of it",
    ("read",),
    syncs=False,
)
NESTED_REPLAY = Rule(
    "replaying or capturing a graph inside a capture",
    NOT_PERMITTED,
    "replay graphs outside of captures",
    ("replay_inside_a_capture",),
    syncs=False,
)
OUTSIDE_WORK = Rule(
    "the capture depends on work of a stream that does not belong to it",
    "CUDA would refuse with 'dependency created on uncaptured work in another stream'",
    "let the side stream wait for the capturing stream first: side.wait_stream(torch.cuda.current_stream())",
    ("side stream: not forked, joined", "stream: wait for an idle one"),
    syncs=False,
)
OUTSIDE_ALLOCATION = Rule(
    "an allocation for a stream outside the capture",
    "cudaMalloc for a stream outside the capture would stop it ('operation failed due to a previous error')",
    "let the side stream wait for the capturing stream first: side.wait_stream(torch.cuda.current_stream())",
    ("side stream: not forked, unused", "default stream work"),
    syncs=False,
)
NEW_GENERATOR = Rule(
    "making a generator inside a capture",
    "torch would refuse with 'Cannot construct a new CUDAGeneratorImpl during CUDA graph capture'",
    "make the generator before the capture and register it with the graph",
    ("host rand on dev gen",),
    syncs=False,
    invalidates=False,
)
LEGACY_STREAM = Rule(
    "the default stream waits for captured work",
    "CUDA would stop the capture: the default stream cannot be part of one",
    "fork to a stream of your own, torch.cuda.Stream()",
    ("default stream: joins",),
    syncs=False,
)
SPLIT_BY_DEVICE = Rule(
    "split positions must be on the host",
    "torch would refuse with 'tensor_split expected tensor_indices_or_sections to be on cpu'",
    "pass a list of Python numbers",
    ("tensor_split(dev t)", "tensor_split(host t)"),
    syncs=False,
    invalidates=False,
    eager=True,
)
RESEED = Rule(
    "setting a generator's state inside a capture",
    "torch would refuse: set_current_seed can be called during capture only with the seed it has",
    "seed before the capture",
    ("manual_seed", "get_rng_state", "set_rng_state"),
    syncs=False,
    invalidates=False,
)


_SIZE_FROM_DATA = "the result's size depends on device data, which the host must read"

RULES: tuple[Rule, ...] = (
    Rule(
        "the host reads device memory",
        NOT_PERMITTED,
        KEEP_ON_DEVICE,
        (
            ".item()",
            "bool(t)",
            "int(t) loop",
            "x[:tensor]",
            "x[tensor0d]",
            "range index",
            "max(iter)",
            "torch.arange(t)",
        ),
        ops="_local_scalar_dense item is_nonzero",
    ),
    Rule(
        "a nested tensor copies its sizes from the host",
        UNPINNED,
        "keep ragged data packed, with offsets in a persistent buffer",
        ("nested_tensor",),
        ops="_nested_tensor_from_tensor_list",
    ),
    Rule(
        _SIZE_FROM_DATA,
        NOT_PERMITTED,
        FIXED_SHAPE,
        ("unique(dim)",),
        ops="unique_dim unique_dim_consecutive",
        syncs=False,  # it waits, but not through what sync debug mode watches
    ),
    Rule(
        _SIZE_FROM_DATA,
        NOT_PERMITTED,
        FIXED_SHAPE,
        ("nonzero", "where(1)", "masked_select", "unique", "bincount"),
        ops=(
            "nonzero nonzero_numpy argwhere masked_select _unique _unique2 unique_consecutive "
            "bincount _to_sparse to_sparse _coalesce coalesce sparse_mask"
        ),
    ),
    Rule(
        _SIZE_FROM_DATA,
        NOT_PERMITTED,
        FIXED_SHAPE,
        ("where(1)",),
        ops="where",
        applies=lambda call: call.overload == "default",
    ),
    Rule(
        "indexing by a mask needs nonzero(), whose size the host must read",
        NOT_PERMITTED,
        "use torch.where, masked_fill, or index with a precomputed index tensor of fixed size",
        ("x[mask]", "x[mask]=cuda0d", "x[mask]=cuda1d"),
        ops="index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put",
        applies=conditions.indexes_by_device_mask,
    ),
    Rule(
        "the index lives on the host and is copied to the device",
        UNPINNED,
        "keep index tensors on the device; replace x[[0, 2]] by a persistent device index",
        ("x[host_idx]", "x[list]", "x[np idx]"),
        ops="index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put",
        applies=conditions.indexes_by_host_tensor,
        crosses=True,
        invalidates=False,
    ),
    Rule(
        "the assigned scalar is copied from the host",
        UNPINNED,
        "use fill_, masked_fill_, index_fill_ or scatter_ with a Python number",
        ("x[idx]=0.",),
        ops="index_put index_put_ _index_put_impl_",
        applies=conditions.assigns_host_scalar_by_index,
        crosses=True,
        invalidates=False,
    ),
    Rule(
        "the output size of repeat_interleave is read from the device",
        NOT_PERMITTED,
        "pass output_size=",
        ("repeat_interleave",),
        ops="repeat_interleave",
        applies=conditions.repeats_decide_the_size,
    ),
    Rule(
        "the number of classes is read from the device",
        NOT_PERMITTED,
        "pass num_classes=",
        ("one_hot",),
        ops="one_hot",
        applies=lambda call: call["num_classes"] in (None, -1),
    ),
    Rule(
        "the host reads the outcome of a comparison",
        NOT_PERMITTED,
        KEEP_ON_DEVICE,
        ("equal", "allclose"),
        ops="equal",
        applies=conditions.not_the_same_memory,
    ),
    Rule("the host reads the outcome of a comparison", NOT_PERMITTED, KEEP_ON_DEVICE, ("allclose",), ops="allclose"),
    Rule(
        "the range of the histogram is read from the device",
        UNPINNED,
        "pass min= and max=",
        ("histc auto",),
        ops="histc",
        applies=conditions.histogram_range_open,
    ),
    Rule(
        "the value tensor is read with .item()",
        NOT_PERMITTED,
        "use torch.where(mask, value, x), or a Python number",
        ("masked_fill_(m,cuda0d)",),
        ops="masked_fill masked_fill_ index_fill index_fill_",
        applies=conditions.any_device("value"),
    ),
    Rule(
        "a host scalar tensor is copied to the device",
        UNPINNED,
        "pass a Python number, or keep the scalar on the device",
        ("where(m,x,host0d)",),
        ops="where",
        applies=conditions.selects_host_scalar,
        crosses=True,
        invalidates=False,
    ),
    Rule(
        "the bounds of the range are read from the device",
        NOT_PERMITTED,
        "use bounds known on the host and scale on the device",
        ("linspace(dev)",),
        ops="linspace logspace arange randint_like",
        applies=conditions.any_device("start", "end", "high"),
    ),
    Rule(
        "sorted membership tests need unique(), whose size the host must read",
        NOT_PERMITTED,
        "compare by broadcasting: (x[:, None] == tests).any(-1)",
        ("isin large",),
        ops="isin",
        applies=conditions.isin_sorts,
    ),
    Rule(
        "the sorter's range is checked on the host",
        NOT_PERMITTED,
        "gather the sorted sequence first and pass no sorter",
        ("searchsorted sorter",),
        ops="searchsorted",
        applies=conditions.any_device("sorter"),
    ),
    Rule(
        "the standard deviations are checked on the host",
        NOT_PERMITTED,
        "use torch.randn(...) * std + mean",
        ("normal(std tensor)",),
        ops="normal",
        applies=conditions.any_device("std"),
    ),
    Rule(
        "the solver's error codes are read by the host",
        NOT_PERMITTED,
        "use the _ex form with check_errors=False where there is one",
        ("linalg.inv", "linalg.solve", "linalg.cholesky"),
        ops=(
            "_linalg_check_errors linalg_inv _linalg_eigh linalg_eigh _linalg_svd linalg_svd linalg_eig "
            "linalg_eigvals _linalg_eigvals linalg_lstsq linalg_matrix_exp"
        ),
    ),
    Rule(
        "the lengths are read by the host",
        NOT_PERMITTED,
        "pass the lengths as host values",
        ("read",),
        ops="_ctc_loss ctc_loss",
        applies=conditions.any_device("input_lengths", "target_lengths"),
    ),
    Rule(
        "the segment lengths are checked by the host",
        NOT_PERMITTED,
        "pass unsafe=True",
        ("segment_reduce", "segment_reduce unsafe"),
        ops="segment_reduce",
        applies=conditions.reduces_at_once,
    ),
    Rule(
        "there is no CUDA kernel",
        "torch would refuse with 'Could not run ... with arguments from the CUDA backend'",
        "use torch.histc, or searchsorted and scatter_add_",
        ("histogram",),
        ops="histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors",
        syncs=False,
        invalidates=False,
        eager=True,
    ),
    Rule(
        "CUDA multiplies no integer matrices",
        "torch would refuse with '... not implemented for Long'",
        "multiply in floating point",
        ("integer matmul",),
        ops="mm bmm addmm baddbmm addmv mv dot vdot",
        applies=conditions.multiplies_integers,
        syncs=False,
        invalidates=False,
        eager=True,
    ),
    Rule(
        "a copy from unpinned host memory",
        UNPINNED,
        COPY_BEFORE,
        ("x[1]=1.", "dev.copy_(host)", "dev.copy_(host0d)", "x[2:]=host1d"),
        ops="copy_",
        applies=conditions.host_to_device(pinned=False),
        crosses=True,
        invalidates=False,
    ),
    Rule(
        "a blocking copy from the host",
        NOT_PERMITTED,
        NON_BLOCKING,
        ("pinned.to(dev)",),
        ops="copy_",
        applies=conditions.host_to_device(pinned=True),
        crosses=True,
    ),
    Rule(
        "a copy to unpinned host memory",
        UNPINNED,
        KEEP_ON_DEVICE,
        ("host.copy_(dev)", ".cpu()"),
        ops="copy_",
        applies=conditions.device_to_host(pinned=False),
        crosses=True,
        invalidates=False,
    ),
    Rule(
        "a blocking copy to the host",
        NOT_PERMITTED,
        NON_BLOCKING,
        ("pinned.copy_(dev)",),
        ops="copy_",
        applies=conditions.device_to_host(pinned=True),
        crosses=True,
    ),
)

_OPERATIONS = frozenset(name for rule in RULES for name in rule.ops.split())
BY_OPERATION: dict[str, tuple[Rule, ...]] = {
    name: tuple(rule for rule in RULES if name in rule.ops.split()) for name in _OPERATIONS
}


ON_DEVICE: dict[str, tuple[Rule, ...]] = {
    name: rules for name in _OPERATIONS if (rules := tuple(rule for rule in BY_OPERATION[name] if not rule.crosses))
}
"""Rules that may apply if all tensors are on the device."""


def refusal(call: Call, by_operation: Mapping[str, tuple[Rule, ...]] = BY_OPERATION) -> Rule | None:
    """The rule by which CUDA refuses `call` in a capture, if any."""
    for rule in by_operation.get(call.name, ()):
        if rule.applies(call):
            return rule
    return None


# Functions whose CPU kernels check values on the host where the CUDA kernels do not (measured: "quantile",
# "one_hot(n)").
CHECKED_ON_CPU_ONLY: frozenset[Any] = frozenset(
    {torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile}
)
