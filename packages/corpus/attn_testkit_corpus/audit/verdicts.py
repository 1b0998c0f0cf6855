"""Settings and results of an audit: plain values, and the rules that make them good or bad."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attn_testkit.registry import UsageError
from attn_testkit.results.checks import CHECKS


@dataclass(frozen=True)
class Settings:
    """Settings of an audit."""

    tier: str = "core"
    device: str = "auto"
    seed: int = 0
    faults: tuple[str, ...] = ()
    """Globs on slugs of faults, field bugs and controls; empty: all."""
    classes: str = ""
    """Letters of classes of bugs, and no controls; empty: all."""
    field_bugs: str = ""
    """A folder of field bugs, which run instead of faults and controls; empty: none."""
    jobs: int = 2
    timeout_s: float = 240.0
    """Time limit of a task; controls get five times as long."""
    caught_before: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    """Slug of a fault -> (execution, case) that is tried first on it: the one that caught it in an earlier audit."""

    @property
    def partial(self) -> bool:
        """True if only some faults are asked for, or field bugs."""
        return bool(self.faults or self.classes or self.field_bugs)


@dataclass(frozen=True)
class Task:
    """A fault, one mode and execution of a control, or an adversarial backend."""

    kind: str
    """``fault``, ``control`` or ``adversarial``."""
    name: str
    mode: str = ""
    execution: str = ""


@dataclass(frozen=True)
class FaultVerdict:
    """Result of one fault."""

    slug: str
    bug_class: str
    source: str
    expected: tuple[str, ...]
    caught_by: tuple[str, ...] = ()
    """Checks that failed in the first case that caught the bug, as reported; ``crashed`` and ``timed out`` count."""
    case: str = ""
    mode: str = ""
    execution: str = ""
    text: str = ""
    """The failure as a user would see it."""
    case_runs: int = 0
    """Case-runs until it was caught, that one included."""
    seconds: float = 0.0
    lost: bool = False
    """True if the device context was lost, and with it the process."""
    not_run: str = ""
    """Reason why nothing could be run here."""

    @property
    def caught(self) -> bool:
        """True if anything was reported."""
        return bool(self.caught_by)

    @property
    def first(self) -> str:
        """The check that was reported first."""
        return self.caught_by[0] if self.caught_by else ""

    @property
    def as_expected(self) -> bool:
        """True if one of the checks that must catch it failed. Wrong results within the limits of the oracle are found
        by counts of keys, in cases of codes.
        """
        counted = {"keys-counted-once"} if "matches-oracle" in self.expected else set[str]()
        return bool(set(self.caught_by) & (set(self.expected) | counted))


@dataclass(frozen=True)
class ControlVerdict:
    """Result of one mode and execution of a control."""

    name: str
    mode: str
    execution: str
    case_runs: int = 0
    alarms: int = 0
    texts: tuple[str, ...] = ()
    seconds: float = 0.0
    lost: bool = False
    """True if the device context was lost, and with it the process."""


@dataclass(frozen=True)
class AdversarialVerdict:
    """Result of one adversarial backend, and of the same code without the cheat."""

    slug: str
    mechanism: str
    exit_code: int
    """Exit code of a run of the backend: anything but 0 is right."""
    ending: str
    honest_exit_code: int
    """Exit code of a run of its healthy control: 0 is right."""
    honest_ending: str
    seconds: float = 0.0

    @property
    def green(self) -> bool:
        """True if the cheat passed."""
        return self.exit_code == 0

    @property
    def proves(self) -> bool:
        """True if the backend failed only because of the cheat: without the cheat the same code passes."""
        return not self.green and self.honest_exit_code == 0


Verdict = FaultVerdict | ControlVerdict | AdversarialVerdict


@dataclass
class Audit:
    """Result of an audit."""

    settings: Settings
    faults: list[FaultVerdict] = field(default_factory=list)
    controls: list[ControlVerdict] = field(default_factory=list)
    adversarial: list[AdversarialVerdict] = field(default_factory=list)
    seconds: float = 0.0
    device: str = ""

    @property
    def survivors(self) -> list[FaultVerdict]:
        """Faults that nothing caught, or that could not be run."""
        return [verdict for verdict in self.faults if not verdict.caught]

    @property
    def alarms(self) -> list[ControlVerdict]:
        """Controls on which a check failed."""
        return [verdict for verdict in self.controls if verdict.alarms]

    @property
    def first_catches(self) -> dict[str, int]:
        """Check -> faults for which it is reported first."""
        counts = Counter(verdict.first for verdict in self.faults if verdict.caught)
        listed = (*CHECKS, *(word for word in ("crashed", "timed out") if counts[word]))
        return {check: counts[check] for check in listed}

    @property
    def caught_alone(self) -> dict[str, int]:
        """Check -> faults that only it reports."""
        counts = Counter(verdict.first for verdict in self.faults if len(verdict.caught_by) == 1)
        return {check: counts[check] for check in self.first_catches}

    @property
    def idle_checks(self) -> list[str]:
        """Checks that catch nothing that others miss. Empty if only some faults were tried."""
        if self.settings.partial:
            return []
        return [check for check, count in self.caught_alone.items() if check in CHECKS and not count]

    @property
    def exit_code(self) -> int:
        """1 on any survivor, false alarm, idle check or adversarial backend that passed; 5 when nothing was tried."""
        if not self.faults and not self.controls and not self.adversarial:
            return 5
        unproved = [verdict for verdict in self.adversarial if not verdict.proves]
        return 1 if self.survivors or self.alarms or self.idle_checks or unproved else 0

    def as_plain(self) -> dict[str, Any]:
        """The audit as JSON-ready values."""
        return {
            "settings": {key: value for key, value in asdict(self.settings).items() if key != "caught_before"},
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "first_catches": self.first_catches,
            "caught_alone": self.caught_alone,
            "idle_checks": self.idle_checks,
            "survivors": [verdict.slug for verdict in self.survivors],
            "false_alarms": sum(verdict.alarms for verdict in self.controls),
            "faults": [asdict(verdict) for verdict in self.faults],
            "controls": [asdict(verdict) for verdict in self.controls],
            "adversarial": [asdict(verdict) for verdict in self.adversarial],
        }


def caught_before(path: str) -> Mapping[str, tuple[str, str]]:
    """Slug of each fault that was caught in a recorded audit -> (execution, case) that caught it.

    That case will most likely catch it again. Raises ``UsageError`` for a file that cannot be read, or is not a record
    of an audit.
    """
    try:
        record = json.loads(Path(path).read_text("utf-8"))
        return {row["slug"]: (row["execution"], row["case"]) for row in record["faults"] if row["case"]}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a record of an audit, as --json writes it: {type(error).__name__}: {error}"
        ) from error
