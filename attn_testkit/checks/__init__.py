"""What is promised: one file per kind of promise, plain functions on host data, no pytest."""

from .promises import PROMISES, Promise

__all__ = ["PROMISES", "Promise"]
