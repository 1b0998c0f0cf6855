"""Facts about a whole run: its selection, its machine, and its exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .case_result import BAD, RAN, CaseResult, Status


@dataclass(frozen=True)
class Selection:
    """The part of a tier that a run covers. It is empty if the run covers everything that the tier plans for everything
    that is declared: only such a run can be ``CONFORMANT``. ``reports/verdict.py`` makes and reads it.
    """

    by: tuple[str, ...] = ()
    """Options and hooks that selected, in words such as ``mode decode``; empty if nothing was left out."""
    of: int = 0
    """Number of case-runs that the tier plans without the selection; 0 if they were not counted."""
    beyond: int = 0
    """Number of selected case-runs that the tier does not plan: cases that were named by their ids."""
    asked: bool = True
    """False if no argument of the caller asked for it, for example if a pytest hook deselects tests: then the exit code
    is not 0."""
    shard: str = ""
    """``K/N`` if the run is one shard of N."""

    def __bool__(self) -> bool:
        return bool(self.by)

    @property
    def of_cases(self) -> bool:
        """True if it takes some cases of a mode and execution, and not only whole modes and executions."""
        return any(not text.startswith(("mode ", "execution ")) for text in self.by)


@dataclass(frozen=True)
class RunHeader:
    """Facts about the whole run that every report needs."""

    kit: str
    """Version of the kit."""
    started: str
    """ISO time, UTC."""
    command: str
    tier: str
    seed: int
    device: str
    """One of ``cuda`` and ``emulated``."""
    device_name: str
    """Name of the device: ``NVIDIA H200 sm90``, or ``CPU (emulated CUDA)``."""
    versions: Mapping[str, str]
    """Versions of python, torch, and of triton and flashinfer if they are installed."""
    backends: Mapping[str, str]
    """Spec -> version or origin."""
    planned: int
    """Number of case-runs that this run has to do: all of the tier, or of the selection."""
    sharing: str = ""
    """Sentence about a shared GPU, such as ``14 lanes share the GPU by NVIDIA's MPS``; empty if no GPU is shared."""
    limits: tuple[str, ...] = ()
    """Limits of the emulation; empty on hardware."""
    not_covered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> declared values, in the modes that ran, that no case of the run covers. Empty if cases were named by
    hand."""
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> values in ``not_covered`` that cases of the tier could cover: no number larger than in any case, and no
    number from a long list of which a tier samples some. Empty in smoke, which samples everything."""
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> declared features that no case combines, and the reason for the exclusion. Empty in smoke."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> remarks on the backend on this machine: changes in the process by importing its server, and missing parts
    that torch replaces."""
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Spec -> ``file`` and ``sha256`` of the module that was imported, ``kernels``: the Triton kernels in it and in the
    modules that it uses, empty for none, and ``code``: a hash of all these modules."""
    plan: str = ""
    """Digest, in the record of a shard, of every case-run of the plan, those of other shards included."""
    planned_in_all: int = 0
    """Number, in the record of a shard, of the case-runs of the plan, those of other shards included."""
    explained: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Id of each check -> ``text``, ``cause``, ``source`` and ``how_to_read``, so that a page can explain it."""
    not_declared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> capabilities that other backends declare and this one does not, and those that it leaves at their
    defaults."""
    selection: Selection = field(default_factory=Selection)
    """The part of the tier that this run takes."""
    profile: str = ""
    """Digest of the frozen profile that ``tier`` names; empty for a tier."""
    kit_digest: str = ""
    """Digest of the kit's code, in the record of a profile."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """Spec -> what the backend declares, in one line, in the record of a profile."""


CUT = 7
"""Exit code of a run that its budget cut short and in which nothing failed. pytest uses 6 for warnings."""


def exit_code(
    planned: int,
    results: Iterable[CaseResult],
    interrupted: bool = False,
    problems: Sequence[str] = (),
    *,
    shard_of: int = 0,
) -> int:
    """The exit code, in pytest's numbers: 0 conformant, 1 not (or planned case-runs did not run), 2 interrupted, 3 the
    kit itself failed, 5 nothing to run; 7 if nothing failed and the budget left something out. ``problems``: further
    reasons why the run fails. ``shard_of``: number of case-runs of the whole run, if this is a shard: only all shards
    together show if anything works.
    """
    runs = [result for result in results if result.is_case_run]
    if interrupted:
        return 2
    if any(result.of_the_kit for result in runs):
        return 3
    left = sum(result.left_out for result in runs)
    if not planned and not runs:
        return 1 if problems else 0 if shard_of else 5
    counts = Counter(result.status for result in runs)
    accounted = sum(counts[status] for status in RAN | {Status.QUARANTINED})
    accounted += sum(result.had_no_room for result in runs)
    # A run with only known failures does not pass: nothing is known to work.
    good = (
        (counts[Status.PASSED] or shard_of)
        and accounted + left >= planned
        and not any(counts[status] for status in BAD)
    )
    if not good or problems:
        return 1
    return CUT if left else 0
