"""Adversarial backends: wrong, with one way each to pass, and the same code without the cheat."""

from .catalogue import Adversarial, all_adversarial

__all__ = ["Adversarial", "all_adversarial"]
