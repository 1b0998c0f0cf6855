"""Small backends to read and to run: one correct backend, and two with real bugs."""

from .minimal import MinimalBackend
from .off_by_one import OffByOneBackend
from .packed_stride import PackedStrideBackend

__all__ = ["MinimalBackend", "OffByOneBackend", "PackedStrideBackend"]
