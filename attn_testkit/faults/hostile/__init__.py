"""Adversarial backends: wrong, with one way each to pass, and the same code without the cheat."""

from .catalogue import Hostile, all_hostile

__all__ = ["Hostile", "all_hostile"]
