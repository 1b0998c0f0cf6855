"""Generators of the device: CPU generators that report the device."""

from __future__ import annotations

from typing import Any

import torch

from cuda_on_cpu import rules, session

_RealGenerator = torch.Generator
_CUDA = torch.device("cuda", 0)


class EmulatedGenerator(_RealGenerator):
    """Result of `torch.Generator(device="cuda")` inside the emulation."""

    def __new__(cls) -> EmulatedGenerator:
        """A generator on the CPU, with torch's default seed."""
        return super().__new__(cls)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """cuda:0, although random numbers are drawn on the CPU."""
        return _CUDA


class _MakesGenerators(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _RealGenerator)


class GeneratorFactory(metaclass=_MakesGenerators):
    """Object that `torch.Generator` names inside the emulation; `isinstance` with it accepts every generator."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """An EmulatedGenerator for a CUDA `device`, else torch's own.

        Raises CaptureError for a CUDA one inside a capture, as torch does.
        """
        on_device = isinstance(device, int) or torch.device(device).type == "cuda"
        if not on_device:
            return _RealGenerator(device)
        current = session.current()
        if current is not None and current.capture is not None:
            current.refuse(rules.NEW_GENERATOR, "torch.Generator(device='cuda')")
        return EmulatedGenerator()
