"""What compilers say of one mistake: a text for each shape, with made-up names, which stand in braces."""

from __future__ import annotations

import hashlib
from base64 import b32encode

__all__ = ["FILES", "OWN_FILES", "TEXTS", "text_of"]

TEXTS = {
    "inductor, generated module": (
        "forward raised RuntimeError: Triton Error in /tmp/torchinductor_root/{two}/c{hash}.py:{n} in "
        "call: buf{n} = empty_strided_cuda(({n}, 64), (64, 1), torch.bfloat16)"
    ),
    "inductor, own cache folder": (
        "forward raised InductorError: CalledProcessError: g++ /data/cache/{two}/c{hash}.main.cpp -o x"
    ),
    "inductor, kernel": (
        "a warm-up before capture raised OutOfResources: triton_poi_fused_add_mul_sum_{n}: out of "
        "resource: shared memory, Required: {n}, Hardware limit: 232448. Reducing block sizes may help"
    ),
    "inductor, buffers": (
        "forward raised LoweringException: AssertionError: buf{n} has no layout, target: "
        "aten.view.default, args[0]: TensorBox(StorageBox(InputBuffer(name='primals_{n}', size=[s{n}, "
        "128])))"
    ),
    "dynamo, guard": (
        "forward raised Unsupported: call_function UserDefinedObjectVariable(plan) "
        "[ConstantVariable(int: {n})] at 0x7f{hex}"
    ),
    "dynamo, fake tensors": (
        "forward raised TorchRuntimeError: RuntimeError when making fake tensor call FakeTensor(..., "
        "device='cuda:0', size=(s{n}, 8, 64)) in graph_{n}"
    ),
    "dynamo, symbols": "forward raised ConstraintViolationError: L['q'].size()[0] = {n} is not in s{n} > u{n}",
    "fx, graph module": "forward raised IndexError: <eval_with_key>.{n}:{n} getitem_{n} = arg{n}_1[{n}]",
    "functorch": (
        "forward raised RuntimeError: vmap: In-place of BatchedTensor(lvl={n}, bdim=0) at 0x{hex} in <lambda_{n}>"
    ),
    "triton, compile": (
        "forward raised CompilationError: at {n}:{n}: AssertionError('shape of arange {n} is no power of 2')"
    ),
    "triton, ptxas": "forward raised PTXASError: /tmp/tmp{two}{n}.ptx, line {n}; error: Arguments mismatch",
    "triton, cache": "forward raised FileNotFoundError: No such file: '/root/.triton/cache/{HASH}/kernel.cubin'",
    "cuda, address": (
        "forward raised AcceleratorError: CUDA error: an illegal memory access was encountered at 0x7f{hex}00"
    ),
    "cuda, object": "forward raised TypeError: unsupported operand: <my_pkg.plan.Plan object at 0x7f{hex}>",
    "cuda, handle": "forward raised RuntimeError: cuModuleLoadData of {sha} failed",
}
"""Kind of text -> headline."""
FILES = (
    "/tmp/torchinductor_root/ab/c123.py",
    "/data/cache/ab/c{hash}.py",
    "<eval_with_key>.5",
    "<string>",
    "<__array_function__ internals>",
    "<attrs generated init my_pkg.Plan>",
    "/root/.triton/cache/{HASH}/launcher.py",
    "/scratch/kernels/{HASH}/launcher.py",
    "/home/me/.cache/flashinfer/0.7.2/90a/plan.py",
    "C:\\Users\\me\\AppData\\torchinductor_me\\ab\\c123.py",
    "/home/me/torch_compile_debug/run_2026/model.py",
)
"""Files that compilers write."""
OWN_FILES = (
    "/home/me/my_pkg/attn.py",
    "/tmp/attn.py",
    "/tmp/tmpab12/c123.py",
    "<stdin>",
    "<ipython-input-3-0a1b2c>",
    "<doctest my_pkg.attn[0]>",
    "/home/me/.cache/huggingface/modules/transformers_modules/model.py",
    "/home/me/triton/kernels/attn.py",
    "/home/me/lib/python3.11/site-packages/my_pkg/ops.py",
)
"""Those that people write."""


def text_of(template: str, n: int) -> str:
    """The text as the ``n``-th shape has it."""
    digest = hashlib.sha256(f"{template} {n}".encode())
    base = b32encode(digest.digest()).decode().rstrip("=")
    return template.format(
        n=n, two=base[:2].lower(), hash=base[:51].lower(), HASH=base[:52], hex=digest.hexdigest()[:8],
        sha=digest.hexdigest(),
    )  # fmt: skip
