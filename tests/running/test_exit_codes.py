"""Exit code 0 comes from a complete record alone: at every front end, whatever ends the process, and wherever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_worker_process import THREE, TWO

from attn_testkit.registry import BackendNotFound
from attn_testkit.running.processes import worker_process
from attn_testkit.running.processes.worker_process import import_seconds

HERE = Path(__file__).parent
CLI = ("-m", "attn_testkit")
ASKED = ("--device", "cpu", "--execution", "eager")
PYTEST = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "attn_testkit.suite", "--attn-device=cpu",
    "--attn-execution=eager", f"--attn-case={THREE}",
)  # fmt: skip
SCRIPT = """
import sys
from attn_testkit import check_backend
from attn_testkit.results.run_header import exit_code
found = check_backend({spec!r}, device="cpu", executions=["eager"], cases={cases!r}, {options})
print(found)
sys.exit(exit_code(1, found))
"""


def _script(spec: str, options: str = "") -> tuple[str, ...]:
    return ("-c", SCRIPT.format(spec=spec, options=options, cases=(THREE,)))


FRONT_ENDS = {
    "run": lambda spec: (*CLI, "run", "-b", spec, *ASKED, "--case", THREE),
    "run -j 2": lambda spec: (*CLI, "run", "-b", spec, *ASKED, "--case", THREE, "--case", TWO, "-j", "2"),
    "run --in-process": lambda spec: (*CLI, "run", "-b", spec, *ASKED, "--case", THREE, "--in-process"),
    "repro": lambda spec: (*CLI, "repro", "-b", spec, *ASKED, THREE),
    "repro --in-process": lambda spec: (*CLI, "repro", "-b", spec, *ASKED, "--in-process", THREE),
    "pytest": lambda spec: (*PYTEST, f"--attn-backend={spec}"),
    "pytest -n 2": lambda spec: (*PYTEST, f"--attn-backend={spec}", "-n", "2"),
    "check_backend": _script,
    "check_backend in_process": lambda spec: _script(spec, "in_process=True"),
}
AT_IMPORT, AT_IMPORT_SEGV = "exits_at_import:Backend", "segfaults_at_import:Backend"
CONSTRUCTOR, FORWARD, AT_EXIT, SEGV = (
    f"unruly_backends:{name}" for name in ("ExitsInConstructor", "ExitsInForward", "WrongAndExitsAtExit", "Segfaults")
)
ZERO, KILLED, GUARDED = "ended itself with exit code 0", "was killed by SIGSEGV", "os._exit(0) was called"
WRONG = "differs from the oracle"
TABLE = [
    ("run", AT_IMPORT, 4, ZERO),
    ("run", AT_EXIT, 1, WRONG),
    ("run -j 2", FORWARD, 1, ZERO),
    ("run --in-process", FORWARD, 3, GUARDED),
    ("run --in-process", AT_EXIT, 3, WRONG),
    ("run --in-process", SEGV, -11, ""),
    ("repro", AT_IMPORT, 4, ZERO),
    ("repro --in-process", CONSTRUCTOR, 3, GUARDED),
    ("pytest", AT_IMPORT_SEGV, 4, KILLED),
    ("pytest", CONSTRUCTOR, 1, ZERO),
    ("pytest", AT_EXIT, 1, WRONG),
    ("pytest -n 2", FORWARD, 1, ZERO),
    ("check_backend", AT_EXIT, 1, WRONG),
    ("check_backend in_process", FORWARD, 3, GUARDED),
]


@pytest.mark.parametrize(("front_end", "spec", "code", "said"), TABLE, ids=[f"{f} {s}" for f, s, *_ in TABLE])
def test_no_ending_of_the_process_is_a_green(front_end: str, spec: str, code: int, said: str, tmp_path: Path) -> None:
    command = [sys.executable, *FRONT_ENDS[front_end](spec)]
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def test_a_module_that_hangs_is_given_up_and_where_it_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_worker_process import results_of

    monkeypatch.setattr(worker_process, "_IMPORT_SECONDS", 6.0)
    with pytest.raises(BackendNotFound, match=r"importing it: no result after 6 s\n.*in wait_for_a_licence_server"):
        results_of("hangs_at_import:Backend", timeout_s=2.0)


@pytest.mark.parametrize(("timeout_s", "seconds"), [(5.0, 60.0), (60.0, 60.0), (61.0, 61.0), (900.0, 900.0)])
def test_an_import_may_take_as_long_as_a_case_run_and_on_a_slow_machine_a_minute(
    timeout_s: float, seconds: float
) -> None:
    assert import_seconds(timeout_s) == seconds
