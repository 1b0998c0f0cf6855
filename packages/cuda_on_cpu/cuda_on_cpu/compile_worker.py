"""The process that compiles launches for a device that this machine lacks: `python -m cuda_on_cpu.compile_worker`.

It reads a target (`sm90`) and launches (JSON, one per line) from its input, and answers each with a line of JSON.
Kernels run in the interpreter if TRITON_INTERPRET is set, but the compiler needs it unset, so this is a separate
process.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def main() -> None:
    """Compile what the input asks for."""
    import torch  # the kit's command line has no torch

    target = int(sys.stdin.readline().strip().removeprefix("sm"))
    _set_driver(target, torch)
    modules: dict[str, Any] = {}
    for line in sys.stdin:
        kernel, module, file, args, kwargs = json.loads(line)
        try:
            found = _found(modules, kernel, module, file)
            given = [_value(modules, each) for each in args]
            named = {name: _value(modules, each) for name, each in kwargs.items()}
        except Exception as error:
            print(json.dumps({"unknown": _reason(error)}), flush=True)
            continue
        try:
            answer = _compiled(found, given, named)
        except Exception as error:  # the compiler's own classes, and whatever a module raises
            answer = {"refused": _reason(error)}
        print(json.dumps(answer), flush=True)


def _set_driver(capability: int, torch: Any) -> None:
    driver = importlib.import_module("triton.runtime.driver").driver
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)

    class Driver:
        """Methods of a driver that the compiler calls."""

        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda"))

    driver.set_active(Driver())


def _found(modules: dict[str, Any], kernel: str, module: str, file: str) -> Any:
    """The kernel, without the tuners around it. Raises ``LookupError`` if it is not at the top of its module."""
    if file not in modules:
        modules[file] = _module(module, file)
    value = modules[file]
    for name in kernel.split("."):
        value = getattr(value, name, None)
    while value is not None and type(value).__name__ != "JITFunction":
        value = getattr(value, "fn", None)
    if value is None:
        raise LookupError(f"{kernel} is not found in {file}: only kernels at the top of a module can be compiled")
    return value


def _module(name: str, file: str) -> Any:
    """The module, executed as far as possible without a device. A script runs up to `if __name__ == "__main__"`."""
    if name != "__main__":
        sys.path.append(str(Path(file).parents[name.count(".")]))
        return importlib.import_module(name)
    made = types.ModuleType("attn_testkit_script")
    made.__file__ = file
    sys.modules[made.__name__] = made
    sys.path.insert(0, str(Path(file).parent))
    try:
        exec(compile(Path(file).read_text(encoding="utf-8"), file, "exec"), vars(made))
    except (Exception, SystemExit) as error:
        print(f"{file} stopped: {error}", file=sys.stderr)  # the kernels above that line are there
    return made


def _value(modules: dict[str, Any], note: Any) -> Any:
    if not isinstance(note, dict):
        return note
    for plain in ("int", "float"):
        if plain in note:
            return note[plain]
    language = importlib.import_module("triton.language")
    if "tensor" in note:
        return _Tensor(note["tensor"], note["rest"])
    if "constexpr" in note:
        return language.constexpr(_value(modules, note["constexpr"]))
    if "type" in note:
        return language.dtype(note["type"])
    if "tuple" in note:
        return tuple(_value(modules, each) for each in note["tuple"])
    return _found(modules, *note["function"])


class _Tensor:
    """A tensor without memory."""

    def __init__(self, dtype: str, rest: int) -> None:
        import torch

        self.dtype, self._rest = getattr(torch, dtype), rest

    def data_ptr(self) -> int:
        """An address that is aligned as the real one was."""
        return self._rest


def _compiled(kernel: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    made = kernel.warmup(*args, grid=(1,), **kwargs)
    made = made.result() if hasattr(made, "result") else made
    registers = stack = None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = importlib.import_module("triton.knobs").nvidia.cuobjdump.path
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False)
        if usage := _USAGE.search(said.stdout):
            registers, stack = map(int, usage.groups())
    words = [word for word in ("wgmma", "tcgen05") if word in made.asm["ptx"]]
    return {
        "shared": made.metadata.shared, "threads": made.metadata.num_warps * 32, "registers": registers, "stack": stack,
        "tensor_memory": getattr(made.metadata, "tmem_size", None) or 0, "uses": words,
    }  # fmt: skip


def _reason(error: Exception) -> str:
    """Reason of a failure: the compiler's last line, and the line of the kernel."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    at = next((line for line in lines if line.startswith("at ")), "")
    return f"{type(error).__name__}: {lines[-1] if lines else ''}" + (f" ({at})" if at else "")


if __name__ == "__main__":
    main()
