"""Broken backends, healthy controls, the catalogue by which the audit tests the kit, and the journal of known bugs."""

from .catalogue import CorpusEntry, all_controls, all_faults
from .known_bugs import KnownBug, all_known_bugs, thread_address

__all__ = ["CorpusEntry", "KnownBug", "all_controls", "all_faults", "all_known_bugs", "thread_address"]
