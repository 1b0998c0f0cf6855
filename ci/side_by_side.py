"""Comparison of SGLang's own attention kit with this one, on one class of SGLang, on one CPU: speed, and bugs found.

    bash ci/servers.sh sglang-0.5.23
    build/servers/sglang-0.5.23/bin/python ci/side_by_side.py
    build/servers/sglang-0.5.23/bin/python ci/side_by_side.py --backend torch_native --json side.json

SGLang's kit is ``sglang.test.kits.attention_unittest`` of the wheel, with the cases of its own tests of this class, its
tolerances and its production graph runners; ``ci/side/theirs.py`` says what had to be prepared. This kit's cases are
the same shapes, as far as its ids can say them, and then tier smoke as people run it. Both run in this kit's emulation
of CUDA, one after the other, each in its own process, and neither's imports are counted.

Each bug of ``packages/servers/tests/bridges/sglang_bugs.py`` is then put into the same class for both: SGLang's kit
runs all its cases, this one those of the mode and execution in which the bug shows. Exit code 0 when it was measured,
whatever was found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from bench_record import machine  # noqa: E402
from side.results import BUGS, SHIPPED, Comparison, Count, Rate, as_json, as_text  # noqa: E402

NAMES = [bug.name for bug in (*BUGS, *SHIPPED)]
THEIRS = "SGLang's kit"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--backend", "-b", type=click.Choice(["triton", "torch_native"]), default="triton", show_default=True)
@click.option("--bug", "bugs", multiple=True, type=click.Choice([*NAMES, "none"]), help="Only these; default: all.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Keep the figures.")
def main(backend: str, bugs: tuple[str, ...], json_file: Path | None) -> None:
    """Run both kits and print what they found."""
    chosen = _chosen(backend, bugs)
    versions = _versions()
    with tempfile.TemporaryDirectory() as folder:
        theirs_file, ours_file = Path(folder) / "theirs.json", Path(folder) / "ours.json"
        options = [part for bug in chosen for part in ("--bug", bug)]
        put_back = [part for bug in BUGS if bug.name in chosen for part in ("--bug", bug.name)]
        theirs = _side("theirs.py", backend, [*put_back, "--out", str(theirs_file)], theirs_file)
        ours = _side("ours.py", backend, [*options, "--theirs", str(theirs_file), "--out", str(ours_file)], ours_file)
    here = machine("CPU (emulated CUDA)", in_process=False)
    made = compared(backend, f"{here['cpu']}, {here['cores']} cores, {here['device']}", versions, theirs, ours)
    click.echo(as_text(made))
    if json_file:
        json_file.write_text(json.dumps(as_json(made), indent=1) + "\n")


def _chosen(backend: str, bugs: tuple[str, ...]) -> list[str]:
    """The bugs to look for. Raises ``click.UsageError`` for one that the class cannot have."""
    if backend != "triton":
        if set(bugs) - {"none"}:
            raise click.UsageError(f"bugs are of TritonAttnBackend; {backend} is run without: leave --bug out")
        return []
    if "none" in bugs and len(bugs) > 1:
        raise click.UsageError("--bug none excludes other bugs")
    return [name for name in NAMES if not bugs or name in bugs]


def _versions() -> dict[str, str]:
    """Versions of what is compared. Ends with advice if this is not an environment of ``ci/servers.sh``."""
    from attn_testkit_servers.bridges.sglang.versions import CURRENT, supported

    run = f"then `build/servers/sglang-{CURRENT}/bin/python ci/side_by_side.py`"
    try:
        found = supported()
    except LookupError as error:
        raise click.ClickException(f"{error}; {run}") from error
    if found != CURRENT:
        raise click.ClickException(
            f"SGLang {found} is installed, and the cases here are those of {CURRENT}: run `bash ci/servers.sh "
            f"sglang-{CURRENT}`, {run}"
        )
    from attn_testkit.environment import versions

    of = versions()
    return {"sglang": found, "torch": of["torch"], "triton": of.get("triton", "not installed")}


def _side(script: str, backend: str, options: list[str], out: Path) -> dict[str, Any]:
    """Run one side and read its results. Ends with its error if it wrote nothing."""
    click.echo(f"{script.removesuffix('.py')}: importing SGLang", err=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "side" / script), "--backend", backend, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"},
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode or not out.exists():
        raise click.ClickException(f"ci/side/{script} ended with exit code {done.returncode}, see above")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def compared(
    backend: str, machine: str, versions: dict[str, str], theirs: dict[str, Any], ours: dict[str, Any]
) -> Comparison:
    """Join both sides. A bug that the release has anyway was not put into SGLang's kit, which ran with it."""
    found = {}
    for bug, of_ours in ours["with_bug"].items():
        red = theirs["with_bug"].get(bug, [len(theirs["red"]), theirs["cases"]])
        found[bug] = {THEIRS: Count(*red)} | {who: Count(*each) for who, each in of_ours.items()}
    rates = [{"who": THEIRS, **{name: theirs[name] for name in _OF_A_RATE}}, *ours["rates"]]
    return Comparison(
        backend, machine, versions, tuple(Rate(**{**each, "red": tuple(each["red"])}) for each in rates), found
    )


_OF_A_RATE = ("cases", "red", "seconds", "cpu_seconds", "checked")


if __name__ == "__main__":
    main()
