"""Broken backends, their healthy twins, and the audit that judges the kit by them."""

from .catalogue import Fault, LeftOut, Twin, all_faults, all_left_out, all_twins

__all__ = ["Fault", "LeftOut", "Twin", "all_faults", "all_left_out", "all_twins"]
