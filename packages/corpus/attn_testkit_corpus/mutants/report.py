"""Report of a hunt: the score, the checks that killed, and every survivor with its line."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .journal import CAPABILITIES, KILLED, KIT, OPEN, SURVIVED, TIMED_OUT, UNREACHED, Verdict
from .operators import Mutant
from .settings import Hunt
from .suspects import suspicion

EQUIVALENT = "equivalent"
_NEVER = "no case-run that was tried executes this line"
_RAISED = ("completes", "import", "output-contract")
"""Checks that kill a mutant which raises or returns no tensor, as any test that calls the backend would."""


def counts(hunt: Hunt) -> Counter[str]:
    """Status -> number of mutants. Mutants that an entry calls equivalent count only as such."""
    found = Counter({EQUIVALENT: len(hunt.reasons)})
    found.update(verdict.status for name, verdict in hunt.verdicts.items() if name not in hunt.reasons)
    return found


def score(hunt: Hunt) -> float | None:
    """Share of mutants killed or timed out, among those evaluated and not named equivalent; None if there are none.

    Mutants that no case-run reaches count as survived.
    """
    found = counts(hunt)
    noticed = found[KILLED] + found[TIMED_OUT]
    evaluated = noticed + found[SURVIVED] + found[UNREACHED]
    return noticed / evaluated if evaluated else None


def _score_of_quiet(hunt: Hunt) -> tuple[int, int]:
    """(killed, evaluated) of the mutants that do not raise."""
    verdicts = [verdict for name, verdict in hunt.verdicts.items() if name not in hunt.reasons]
    killed = sum(v.status == TIMED_OUT or (v.status == KILLED and v.by not in _RAISED) for v in verdicts)
    return killed, killed + sum(v.status in (SURVIVED, UNREACHED) for v in verdicts)


def _unnoticed(hunt: Hunt) -> list[tuple[Mutant, Verdict]]:
    found = [(m, hunt.verdicts[m.id]) for m in hunt.mutants if m.id in hunt.verdicts and m.id not in hunt.reasons]
    found = [(mutant, verdict) for mutant, verdict in found if verdict.status in (SURVIVED, UNREACHED, OPEN, KIT)]
    return sorted(found, key=lambda pair: (pair[0].path, pair[0].line, pair[0].operator))


def _hint(mutant: Mutant, verdict: Verdict) -> str:
    if verdict.status == UNREACHED:
        return _NEVER
    if verdict.status == KIT:
        return f"the kit itself failed, so there is no verdict: {verdict.by}"
    guess = suspicion(mutant)
    if verdict.status == OPEN:
        return f"survived {verdict.runs} case-runs so far, and there are more"
    return f"survived {verdict.runs} case-runs" + (f"; perhaps equivalent: {guess}" if guess else "")


def hunt_text(hunt: Hunt) -> str:
    """Report for a terminal."""
    lines = []
    for mutant, verdict in _unnoticed(hunt):
        lines += [f"{mutant.path}:{mutant.line} {mutant.operator}, in {mutant.scope or 'the module'}: "
                  f"{_hint(mutant, verdict)}"]  # fmt: skip
        lines += [f"  - {line}" for line in mutant.was.splitlines()]
        lines += [f"  + {line}" for line in mutant.becomes.splitlines()] or ["  +"]
    killers = Counter(v.by for name, v in hunt.verdicts.items() if v.status == KILLED and name not in hunt.reasons)
    if killers:
        lines += ["", "killed by, first", *(f"  {count:5}  {check}" for check, count in killers.most_common())]
    found, evaluated = counts(hunt), score(hunt)
    drawn = f"a sample of {len(hunt.mutants)}, seed {hunt.settings.seed}" if hunt.settings.sample else "all of them"
    lines += ["", f"{hunt.settings.backend}: {hunt.all_mutants} mutants of {', '.join(hunt.sources)}; {drawn}"]
    lines += [f"  {found[status]:5}  {words}" for status, words in _WORDS if found[status]]
    left = len({m.id for m in hunt.mutants} - hunt.verdicts.keys() - hunt.reasons.keys())
    lines += [f"  {left:5}  not evaluated: the time was over"] if left else []
    if evaluated is not None:
        killed, quiet = _score_of_quiet(hunt)
        of_quiet = f"; {killed} of {quiet} of those that raise nothing" if quiet else ""
        lines += [
            f"score {evaluated:.1%}{of_quiet}; {hunt.runs} case-runs at most, {hunt.device}, {hunt.seconds:.0f} s"
        ]
    return "\n".join(lines)


_WORDS = (
    (KILLED, "killed"),
    (TIMED_OUT, "timed out, which counts as killed"),
    (SURVIVED, "survived"),
    (UNREACHED, "not reached by any case-run, which counts as survived"),
    (OPEN, "not settled: the time was over"),
    (EQUIVALENT, "named equivalent, not counted"),
    (CAPABILITIES, "declare other capabilities than the backend, not counted"),
    (KIT, "made the kit itself fail, not counted"),
)


def exit_code(hunt: Hunt) -> int:
    """1 when a mutant survived, or was not evaluated; 3 when the kit failed; 5 when there was none; else 0."""
    if not hunt.mutants:
        return 5
    found = counts(hunt)
    if found[KIT]:
        return 3
    evaluated = hunt.verdicts.keys() | hunt.reasons.keys()
    return (
        1 if found[SURVIVED] + found[UNREACHED] + found[OPEN] or any(m.id not in evaluated for m in hunt.mutants) else 0
    )


def plain(hunt: Hunt) -> dict[str, Any]:
    """The hunt as JSON-ready values."""
    rows = []
    for mutant in hunt.mutants:
        verdict = hunt.verdicts.get(mutant.id, Verdict("not evaluated"))
        named = mutant.id in hunt.reasons
        rows.append(
            {"id": mutant.id, "path": mutant.path, "line": mutant.line, "scope": mutant.scope,
             "operator": mutant.operator, "was": mutant.was, "becomes": mutant.becomes,
             "status": EQUIVALENT if named else verdict.status, "by": verdict.by, "run": verdict.run,
             "case_runs": verdict.runs, "seconds": round(verdict.seconds, 2),
             "reason": hunt.reasons.get(mutant.id) or ("" if verdict.status == KILLED else suspicion(mutant))}
        )  # fmt: skip
    return {
        "backend": hunt.settings.backend, "modules": list(hunt.sources), "mutants": hunt.all_mutants,
        "score": score(hunt), "counts": dict(counts(hunt)), "case_runs": hunt.runs, "device": hunt.device,
        "seconds": round(hunt.seconds, 1), "judged": rows,
    }  # fmt: skip
