"""Adversarial backends: each is wrong and tries to pass in one way; each has a control without the cheat."""

from .catalogue import Adversarial, all_adversarial

__all__ = ["Adversarial", "all_adversarial"]
