"""Mutation testing of a backend: lines of it in which no case would notice a mistake."""

from .hunting import hunt
from .settings import Hunt, Settings

__all__ = ["Hunt", "Settings", "hunt"]
