"""What a running server asks of its attention backend, written down, and the cases that are nearest to it."""

from .watch import watch

__all__ = ["watch"]
