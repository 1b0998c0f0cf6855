"""Imports of every fault and every control, for a process that workers are forked from."""

from . import all_controls, all_faults

all_faults()
all_controls()
