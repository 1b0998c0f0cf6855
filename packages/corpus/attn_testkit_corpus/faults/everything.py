"""Imports of every fault and every control, for the process from which workers are forked."""

from . import all_controls, all_faults

all_faults()
all_controls()
