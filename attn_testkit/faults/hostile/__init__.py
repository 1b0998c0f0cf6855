"""Backends that try to be found right though they are wrong, one way each, and the same plumbing without the cheat."""

from .catalogue import Hostile, all_hostile

__all__ = ["Hostile", "all_hostile"]
