"""Compile the kernels that the vendor adapters declare, in parallel and before anything is timed.

    python -m attn_testkit.backends.vendor.warmup --backend flashinfer --head-dim 128

FlashInfer compiles a kernel family (dtypes, head dim, window, soft cap) on its first use: 6 to 15 s each, one after
another, during a measurement. Here every family that an adapter declares is built once, several at a time. Needs nvcc
and ninja; the cache is stored under ``FLASHINFER_WORKSPACE_BASE``.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from attn_testkit.contract import Capabilities

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Family:
    """One module to compile: a generator of the package, and its arguments."""

    maker: str
    """``module:function`` that returns something with ``name`` and ``build``."""
    arguments: tuple[Any, ...]

    def spec(self) -> Any:
        """Specification that the package would compile on first use."""
        module, _, name = self.maker.partition(":")
        return getattr(importlib.import_module(module), name)(*self.arguments)


_MODULES = "flashinfer.jit.attention.modules"
_PACKBITS = Family("flashinfer.jit.quantization:gen_quantization_module", ())
_CASCADE = Family("flashinfer.jit.cascade:gen_cascade_module", ())


def _dtype_pairs(declared: Capabilities) -> list[tuple[torch.dtype, torch.dtype]]:
    pairs = itertools.product(sorted(declared.precision.dtypes), sorted(declared.kv_pool.kv_dtypes))
    return [(_DTYPES[q], _DTYPES[q if kv == "same" else kv]) for q, kv in pairs]


def _plans(declared: Capabilities, head_dims: Sequence[int]) -> Iterable[tuple[Any, ...]]:
    """Parameters of plans that need a compiled module: with and without window and soft cap."""
    for (q, kv), dim, window, cap in itertools.product(_dtype_pairs(declared), head_dims, (False, True), (False, True)):
        yield (q, kv, q, torch.int32, dim, dim, 0, window, cap)


def _prefill(declared: Capabilities, head_dims: Sequence[int]) -> Iterable[Family]:
    """Paged or ragged, with a custom mask or without: all of a module."""
    for common in _plans(declared, head_dims):
        yield Family(f"{_MODULES}:_gen_batch_prefill_primary_module", ("fa2", *common, False))
    yield _PACKBITS
    yield _CASCADE


def _paged(declared: Capabilities, head_dims: Sequence[int]) -> Iterable[Family]:
    """Decode with and without tensor cores, prefill."""
    yield from _prefill(declared, head_dims)
    for q, kv, *others in _plans(declared, head_dims):
        if kv.itemsize > 1:
            yield Family(f"{_MODULES}:gen_batch_decode_module", (q, kv, *others))


def _mla(backend: str) -> Callable[[Capabilities, Sequence[int]], Iterable[Family]]:
    def families(declared: Capabilities, head_dims: Sequence[int]) -> Iterable[Family]:
        for (q, kv), dim, rope in itertools.product(
            _dtype_pairs(declared), head_dims, sorted(declared.heads.mla_rope_dims)
        ):
            yield Family(f"{_MODULES}:gen_batch_mla_module", (backend, q, kv, q, torch.int32, dim, rope, False))

    return families


_BACKENDS = "attn_testkit.backends"
FAMILIES: dict[str, tuple[str, Callable[[Capabilities, Sequence[int]], Iterable[Family]]]] = {
    "flashinfer": (f"{_BACKENDS}.flashinfer:FlashInferBackend", _paged),
    "flashinfer_ragged": (f"{_BACKENDS}.flashinfer_ragged:FlashInferRaggedBackend", _prefill),
    "flashinfer_mla": (f"{_BACKENDS}.flashinfer_mla:FlashInferMLABackend", _mla("fa2")),
    "flashinfer_mla_fa3": (f"{_BACKENDS}.flashinfer_mla:FlashInferMLAFA3Backend", _mla("fa3")),
    "flashinfer_mla_fp8": (f"{_BACKENDS}.flashinfer_mla:FlashInferMLAFP8Backend", _mla("fa3")),
}
"""Backend -> (its class, families that it declares). Adapters with precompiled kernels need no entry."""


def families_of(backends: Sequence[str], head_dims: Sequence[int] = ()) -> list[Family]:
    """Different families that these backends declare. ``head_dims`` narrows the declared ones; empty: all."""
    found: dict[Family, None] = {}
    for name in backends:
        path, families = FAMILIES[name]
        module, _, attribute = path.partition(":")
        declared: Capabilities = getattr(importlib.import_module(module), attribute).capabilities
        dims = [dim for dim in sorted(declared.heads.head_dims) if not head_dims or dim in head_dims]
        found.update(dict.fromkeys(families(declared, dims)))
    return list(found)


def _build(family: Family) -> tuple[str, float]:
    start = time.perf_counter()
    spec = family.spec()
    spec.build(verbose=False, need_lock=True)
    return str(spec.name), time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Build, print progress, return 1 if anything did not compile."""
    parser = argparse.ArgumentParser(prog="python -m attn_testkit.backends.vendor.warmup", description=__doc__)
    parser.add_argument("--backend", action="append", choices=sorted(FAMILIES), help="default: all of them")
    parser.add_argument("--head-dim", action="append", type=int, help="only these of the declared head dims")
    parser.add_argument("--list", action="store_true", help="print what would be compiled, and stop")
    options = parser.parse_args(argv)
    families = families_of(options.backend or sorted(FAMILIES), options.head_dim or ())
    if options.list:
        for family in families:
            print(family.maker.partition(":")[2], *family.arguments)
        return 0
    return compile_all(families)


def compile_all(families: Sequence[Family]) -> int:
    """Build them, print progress, return 1 if anything did not compile."""
    cores = os.cpu_count() or 2
    # A family has about ten files of very different sizes: two of each of many families keep all cores busy.
    os.environ.setdefault("MAX_JOBS", "2")
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "WARNING")
    start, failed = time.perf_counter(), 0
    print(f"compiling {len(families)} kernel families on {cores} cores", flush=True)
    with ThreadPoolExecutor(max_workers=cores) as pool:
        jobs = {pool.submit(_build, family): family for family in families}
        for count, job in enumerate(as_completed(jobs), 1):
            progress = f"[{count}/{len(families)}, {time.perf_counter() - start:.0f} s]"
            error = job.exception()
            if error is None:
                name, seconds = job.result()
                print(f"{progress} {name}: {seconds:.0f} s", flush=True)
            else:
                failed += 1
                print(
                    f"{progress} FAILED {jobs[job].maker} {jobs[job].arguments}: {error}", file=sys.stderr, flush=True
                )
    print(f"{len(families) - failed} compiled, {failed} failed, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
