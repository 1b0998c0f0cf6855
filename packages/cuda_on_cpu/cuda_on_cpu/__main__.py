"""Run a CUDA program on a CPU: `python -m cuda_on_cpu run script.py`."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

RIGHT, WRONG, BROKEN, USAGE = 0, 1, 2, 4


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line ``words``. Returns its exit code."""
    asked = _parser().parse_args(words)
    from cuda_on_cpu.compile_for import TARGETS

    targets = [each for each in asked.targets.split(",") if each]
    wrong = [] if Path(asked.what).exists() else [f"there is no file {asked.what}"]
    wrong += [f"--compile-for has no {each}; it has {', '.join(TARGETS)}" for each in targets if each not in TARGETS]
    if wrong:
        print(f"python -m cuda_on_cpu: {wrong[0]}", file=sys.stderr)
        return USAGE
    code: int
    code, record = asked.do(asked)
    compiled = _compiled(targets, record.pop("notes"), asked.seconds)
    if code == RIGHT and any(each.refused for each in compiled):
        code = WRONG
    if record["finding"]:
        print(record["finding"], file=sys.stderr)
    if asked.json:
        record |= {"exit_code": code, "compiled": [asdict(each) for each in compiled]}
        Path(asked.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return code


def _compiled(targets: Sequence[str], notes: Sequence[Any], seconds: float) -> list[Any]:
    """Compile each launch for each target, and print the results."""
    from cuda_on_cpu.compile_for import compile_for

    found = []
    for target in targets:
        for each in compile_for(target, notes, seconds):
            found.append(each)
            print(f"{'REFUSED ' if each.refused else ''}{each.text()}", file=sys.stderr, flush=True)
    if targets:
        refused, unknown = (sum(bool(getattr(each, name)) for each in found) for name in ("refused", "unknown"))
        print(
            f"{len(notes)} kinds of launches for {', '.join(targets)}: {len(found) - refused - unknown} compiled, "
            f"{refused} refused, {unknown} not compiled",
            file=sys.stderr,
        )
    return found


def _run_script(asked: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    # Read where a kernel is decorated, so before the script imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
    from cuda_on_cpu.launch_log import LaunchLog
    from cuda_on_cpu.policy import Policy

    fill = None if asked.fill == "none" else int(asked.fill, 0)
    policy = Policy(
        bounds=asked.bounds, races=asked.races == "on", masked_loads=asked.masked_loads, fill=fill,
        program_order=asked.program_order, late=asked.device == "late", side_streams=asked.side_streams,
    )  # fmt: skip
    log = LaunchLog()
    code, finding = _run(asked.what, asked.arguments, policy, log)
    print(f"ran on emulated CUDA: {log.launches} launches of {len(log.notes)} kinds", file=sys.stderr)
    notes = list(log.notes.values())
    return code, {"script": asked.what, "finding": finding, "launches": log.launches, "notes": notes}


def _read_notes(asked: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from cuda_on_cpu.launch_log import read_notes

    return RIGHT, {"folder": asked.what, "finding": "", "notes": read_notes(Path(asked.what))}


def _run(script: str, arguments: Sequence[str], policy: Any, log: Any) -> tuple[int, str]:
    """Run the script. Returns an exit code, and the text of the finding."""
    from cuda_on_cpu import EmulationError, emulated_cuda, session

    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with emulated_cuda(policy):
            session.require().launched = log
            runpy.run_path(script, run_name="__main__")
    except EmulationError as error:
        said = {"at": error.site, "why": error.cuda, "cure": error.cure}
        lines = [f"  {name:4}  {text}" for name, text in said.items()]
        return WRONG, "\n".join([f"{type(error).__name__}: {error.operation}", *lines])
    except SystemExit as left:
        return (RIGHT, "") if not left.code else (BROKEN, f"the script ended with {left.code}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        return BROKEN, f"the script raised {type(error).__name__}; see above"
    return RIGHT, ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_on_cpu",
        description="Run a CUDA program on a CPU, and report what a GPU would hide.",
        epilog="Exit codes: 0 nothing was found, 1 an error of the program was found or a kernel does not compile, "
        "2 the script raised another error, 4 wrong arguments.",
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="Run a script.")
    run.add_argument(
        "--bounds", choices=("storage", "view"), default="storage", help="Memory that belongs to a tensor."
    )
    run.add_argument("--races", choices=("on", "off"), default="on", help="Look for races inside a launch.")
    run.add_argument(
        "--masked-loads", choices=("zero", "poison"), default="zero", help="Number that a masked load leaves."
    )
    run.add_argument(
        "--program-order", choices=("forward", "reverse"), default="forward",
        help="Order of the programs of a launch.",
    )  # fmt: skip
    run.add_argument(
        "--side-streams", choices=("at_once", "late"), default="at_once",
        help="Time at which work of side streams happens.",
    )  # fmt: skip
    run.add_argument(
        "--device",
        choices=("quick", "late"),
        default="quick",
        help="Answer of an event that is asked for the first time.",
    )
    run.add_argument("--fill", default="0xFF", help="Byte of uninitialized memory, or none.")
    notes = commands.add_parser("compile", help="Compile launches that were noted in a folder.")
    for each, do in ((run, _run_script), (notes, _read_notes)):
        each.set_defaults(do=do)
        each.add_argument(
            "--compile-for", dest="targets", default="", metavar="TARGETS",
            help="Compile each kind of launch, e.g. for sm90,sm100.",
        )  # fmt: skip
        each.add_argument("--seconds", type=float, default=60.0, help="Longest time for compiling a launch.")
        each.add_argument("--json", metavar="FILE", help="Write the results to a file.")
    run.add_argument("what", metavar="script", help="A Python file.")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="Arguments of the script.")
    notes.add_argument("what", metavar="folder", help="Folder of notes.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
