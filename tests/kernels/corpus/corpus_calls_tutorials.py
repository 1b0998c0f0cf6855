"""Triton's tutorials: their kernels called by their own functions, without the benchmarks around them.

The wheel of Triton does not have them: `TRITON_TUTORIALS` names the folder `python/tutorials` of a checkout. Of a file
the imports, functions, classes and named constants are taken, in order; what it runs when it is imported is not.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_CONSTANTS = {"configs", "layer_norm", "attention", "tma_configs"}


def modules() -> dict[str, types.ModuleType]:
    """Every tutorial as a module, by its number."""
    folder = os.environ.get("TRITON_TUTORIALS")
    if not folder:
        raise LookupError("TRITON_TUTORIALS is not set: name the folder python/tutorials of a checkout of Triton")
    found = {}
    for path in sorted(Path(folder).glob("[0-9][0-9]-*.py")):
        name = f"tutorials.t{path.stem.replace('-', '_')}"
        module = types.ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module
        for statement in ast.parse(path.read_text()).body:
            if _is_definition(statement):
                with contextlib.suppress(Exception):  # what is missing shows where it is used
                    exec(compile(ast.Module([statement], []), str(path), "exec"), vars(module))
        found[path.stem[:2]] = module
    return found


def _is_definition(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(_is_definition(one) for one in (*statement.body, *statement.orelse))
    if isinstance(statement, ast.Assign):
        names = {one.id for target in statement.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        return bool(names & _CONSTANTS) or any(name.isupper() for name in names)
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


def _rand(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype).cuda()


def _attention(module: Any, causal: bool, described: bool) -> None:
    module.supports_host_descriptor = lambda: described
    q, k, v = (_rand(1, 1, 128, 64).requires_grad_() for _ in range(3))
    out = module.attention(q, k, v, causal, 0.5, False)
    out.backward(torch.ones_like(out))


def _layer_norm(module: Any) -> None:
    weight, bias = _rand(48).requires_grad_(), _rand(48).requires_grad_()
    out = module.layer_norm(_rand(5, 48).requires_grad_(), (48,), weight, bias, 1e-5)
    out.backward(torch.ones_like(out))


def _asin(module: Any) -> None:
    x = torch.rand(100).cuda()
    module.asin_kernel[(2,)](x, torch.empty_like(x), 100, BLOCK_SIZE=64)


def _softmax(module: Any) -> None:
    x = _rand(5, 30, dtype=torch.float32)
    out = torch.empty_like(x)
    module.softmax_kernel[(2,)](out, x, 30, 30, 5, 30, BLOCK_SIZE=32, num_stages=2)


def _grouped(module: Any, transposed: bool) -> None:
    left, right = [_rand(128, 64), _rand(128, 64)], [_rand(64, 128), _rand(64, 256)]  # no edge is masked there
    if transposed:
        module.group_gemm_tma_fn(left, [one.T.contiguous() for one in right])
    else:
        module.group_gemm_fn(left, right)


def calls() -> list[tuple[str, Callable[[], None]]]:
    """Each tutorial's kernels; attention with pointers and with descriptors from the host."""
    t = modules()
    half, square = (lambda *shape: _rand(*shape)), (lambda: (_rand(80, 48), _rand(48, 64)))

    def flipped() -> Any:
        return _rand(80, 64), _rand(96, 64)

    return [
        ("01 add", lambda: t["01"].add(half(100), half(100))),
        ("01 add bf16", lambda: t["01"].add(_rand(100, dtype=torch.bfloat16), _rand(100, dtype=torch.bfloat16))),
        ("02 softmax", lambda: _softmax(t["02"])),
        ("03 matmul", lambda: t["03"].matmul(*square())),
        ("03 matmul leaky_relu", lambda: t["03"].matmul(*square(), activation="leaky_relu")),
        ("04 dropout", lambda: t["04"].dropout(half(100), (half(100) > 0).int(), 0.5)),
        ("04 seeded dropout", lambda: t["04"].seeded_dropout(half(100), 0.5, 123)),
        ("05 layer norm", lambda: _layer_norm(t["05"])),
        *[
            (f"06 attention causal={causal} descriptors={described}",
             lambda causal=causal, described=described: _attention(t["06"], causal, described))
            for causal in (True, False) for described in (True, False)
        ],
        ("07 asin", lambda: _asin(t["07"])),
        ("08 grouped", lambda: _grouped(t["08"], False)),
        ("08 grouped by descriptors", lambda: _grouped(t["08"], True)),
        ("09 matmul", lambda: t["09"].matmul(*square())),
        ("09 persistent", lambda: t["09"].matmul_persistent(*square())),
        ("09 tma", lambda: t["09"].matmul_tma(*flipped(), False)),
        ("09 tma persistent", lambda: t["09"].matmul_tma_persistent(*flipped(), False)),
        ("09 tma clc", lambda: t["09"].matmul_tma_clc(*flipped(), False)),
        ("09 descriptor persistent", lambda: t["09"].matmul_descriptor_persistent(*flipped(), False)),
        ("11 add", lambda: t["11"].add(half(100), half(100))),
    ]  # fmt: skip
