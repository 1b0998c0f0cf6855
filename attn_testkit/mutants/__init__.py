"""A backend judged by its mutants: which of its lines no case would notice, were they wrong."""

from .hunting import hunt
from .settings import Hunt, Settings

__all__ = ["Hunt", "Settings", "hunt"]
