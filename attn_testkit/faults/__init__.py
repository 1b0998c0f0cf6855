"""Broken backends, healthy controls, and the catalogue that the audit judges the kit by."""

from .catalogue import Control, Fault, LeftOut, all_controls, all_faults, all_left_out

__all__ = ["Control", "Fault", "LeftOut", "all_controls", "all_faults", "all_left_out"]
