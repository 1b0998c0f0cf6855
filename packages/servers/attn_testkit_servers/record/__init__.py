"""Records of the calls that a running server makes to its attention backend, and the cases nearest to them."""

from .watch import watch

__all__ = ["watch"]
