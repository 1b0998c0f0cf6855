"""vLLM 0.33.0's prefill of GDN does not compile if a key and a value have different widths.

``_fused_post_conv_kernel`` makes ``mask_2d`` [16, K] in one branch of a condition that only the running program knows,
and [16, V] in the other. Triton needs one type behind them. Its compiler is asked for the first representation, which
needs no GPU, and runs nothing. No check of the kit is used. Ends with code 1 if only K = V compiles.
"""

import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, make_backend

sys.path.insert(0, str(Path(__file__).parents[1]))
from alone import VLLM, load

KERNEL = load(
    "vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv", VLLM
)._fused_post_conv_kernel  # fmt: skip
SIZES = {"H": 2, "HV": 4, "BLOCK_T": 16, "APPLY_L2NORM": True, "OUTPUT_G_EXP": False}
SIZES |= {"L2NORM_EPS": 1e-6, "SOFTPLUS_THRESHOLD": 20.0}
FLOAT32 = {"A_log_ptr", "dt_bias_ptr", "g_ptr", "beta_ptr"}


def refused(key: int, value: int) -> str:
    """Return the text of Triton's error; empty if there is none."""
    from triton._C.libtriton import ir

    constants = SIZES | {"K": key, "V": value, "BK": key, "BV": value}
    types = {
        name: "constexpr" if name in constants else "*fp32" if name in FLOAT32 else "*bf16" if "_ptr" in name else "i32"
        for name in KERNEL.arg_names
    }
    source = ASTSource(KERNEL, types, constants)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options, context = backend.parse_options({}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except CompilationError as error:
        return str(error).strip().splitlines()[-1]
    return ""


found = {(key, value): refused(key, value) for key, value in ((64, 64), (128, 128), (64, 128), (128, 64))}
for (key, value), said in found.items():
    print(f"K {key}, V {value}: {said or 'compiles'}")
assert not found[64, 64], "the kernel does not compile at all"
wrong = any(found.values())
print(f"{'WRONG: only K = V compiles' if wrong else 'right'} (triton {triton.__version__})")
sys.exit(int(wrong))
