"""Pages of the checks, and the page of known bugs: made from the checks' texts and from ``faults/known_bugs.toml``."""

from __future__ import annotations

from attn_testkit.checks import CHECKS, Check
from attn_testkit.results.rules import rule_of
from attn_testkit_corpus.faults import all_controls, all_faults, all_known_bugs, thread_address
from attn_testkit_corpus.faults.catalogue import CLASSES

__all__ = ["check_pages"]


def check_pages() -> dict[str, str]:
    """Path in ``docs/`` of each page -> its text: an index of the checks, a page for each, and the known bugs."""
    return {
        "reference/checks.md": _index(),
        **{f"reference/checks/{check.id}.md": _check(check) for check in CHECKS.values()},
        "evidence/known-bugs.md": _known_bugs(),
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _index() -> str:
    rows = [f"| [`{check.id}`](checks/{check.id}.md) | {_cell(check.text)} |" for check in CHECKS.values()]
    lines = [
        "# The checks",
        "",
        "Every check exists because of real bugs. Its page lists usual causes and how to read its failure; "
        "`attn-testkit explain CHECK` prints the same. [Find the cause of a failure](../how-to/find-the-cause.md) "
        "describes what all failures have in common.",
        "",
        "| check | what must hold |",
        "|---|---|",
        *rows,
        "",
        "A result lists the checks that were evaluated and, separately, those that were not because an earlier failure "
        "already explains them.",
        "",
        f"`attn-testkit audit` tests the kit itself. It runs {len(all_faults())} broken backends, which must fail, "
        f"{len(all_controls())} known-good ones, which must pass, and [adversarial backends]"
        "(../explanation/isolation.md) that try to pass, which must fail. `attn-testkit audit --list` lists the broken "
        "and the known-good backends with the check that must catch each. "
        "[Known bugs](../evidence/known-bugs.md) lists the public bugs that they reproduce.",
    ]
    return "\n".join(lines) + "\n"


def _check(check: Check) -> str:
    first = next((fault for fault in all_faults() if fault.checks[0] == check.id), None)
    lines = [
        f"# {check.id}",
        "",
        check.text,
        "",
        f"**Rule of the contract:** [{rule_of(check.id)}](../../contract/index.md#{rule_of(check.id).lower()})",
        "",
        f"**Usual cause:** {check.cause}",
        "",
        f"**Seen in:** {check.source}",
        "",
        f"**How to read its failure:** {check.how_to_read}",
        "",
    ]
    if first:
        lines += [
            "To see such a failure on any machine, run a broken backend that this check catches:",
            "",
            "```",
            f"attn-testkit audit --device cpu --fault '{first.slug}' --verbose",
            "```",
            "",
        ]
    lines.append("[All checks](../checks.md) · [Find the cause of a failure](../../how-to/find-the-cause.md)")
    return "\n".join(lines) + "\n"


def _known_bugs() -> str:
    known, faults = all_known_bugs(), {fault.slug: fault for fault in all_faults()}
    met = sum(bool(bug.faults) for bug in known.bugs)
    lines = [
        "# Known bugs",
        "",
        f"This page lists {len(known.bugs)} bugs that attention backends of public servers, and the kernels below "
        "them, really had.",
        f"**{met} are reproduced** by broken backends that come with the kit; the audit runs them and catches each.",
        f"**{len(known.bugs) - met} are out of reach**:",
        "",
        "| why | bugs | |",
        "|---|---:|---|",
        *(
            f"| {kind} | {sum(bug.outside == kind for bug in known.bugs)} | {words} |"
            for kind, words in known.outside.items()
        ),
        "",
        "A broken backend has the mechanism of the bug in a few lines, and not the server's code. If it had to be "
        "scaled down, its row says how. To see its failure, run `attn-testkit audit --fault NAME --verbose`. The link "
        "leads to the check that must catch it first. To find the bugs of a project, search this page for its name. "
        "Bugs that the kit itself found are on [another page](findings.md).",
    ]
    for letter, words in CLASSES.items():
        bugs = [bug for bug in known.bugs if bug.bug_class == letter]
        if bugs:
            lines += ["", f"## {words[:1].upper()}{words[1:]}", "", "| what is wrong | reported in | reproduced by |"]
            lines.append("|---|---|---|")
        for bug in bugs:
            addresses = [(thread, thread_address(thread, known.projects)) for thread in bug.threads]
            threads = ", ".join(f"[{t}]({address})" if address else t for t, address in addresses)
            verdict = ", ".join(
                f"[`{slug}`](../reference/checks/{faults[slug].checks[0]}.md)"
                + (f" ({_cell(faults[slug].modelled)})" if faults[slug].modelled else "")
                for slug in bug.faults
            )
            wrong = _cell(bug.wrong or faults[bug.faults[0]].about)
            lines.append(f"| {wrong} (`{bug.name}`) | {threads} | {verdict or f'*{bug.outside}*: {bug.why}'} |")
    return "\n".join(lines) + "\n"
