"""Healthy controls of softmax scales."""

from __future__ import annotations

from .catalogue import control
from .g_usual_scaling import UsualScaling


@control("usual-scaling-alone")
class UsualScalingAlone(UsualScaling):
    """The kernel has 1/sqrt(head_dim) built in, and it claims no other."""
