"""``run --watch``: after a save the changed backend runs, first where it failed before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn_testkit.cli import main, watch
from attn_testkit.cli.watch import Files, in_parts
from attn_testkit.running.planning.request import Item

DECODE = "decode-mha2-d64-bf16-p16-k5.9-contiguous-gauss-b2prod"
V2 = "draft-extend-v2-mha2-d64-bf16-p16-k5.9-n2a1x2-contiguous-gauss-b2prod"
RUN = ("run", "tiny.py", "--device", "cpu", "--execution", "eager", "--case", DECODE, "--case", V2, "--watch")
BODY = "        return paged_attention(q, *kv, plan)\n"


@pytest.fixture
def saved(monkeypatch, capfd, tmp_path):
    """Run with saves of ``tiny.py``, each a text for the body of ``run``, and then Ctrl-C: (exit code, what was printed
    before the first save, after it, and so on).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTN_TESTKIT_CACHE", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    main(["new", "tiny", "--into", "."])
    text = Path("tiny.py").read_text()
    assert BODY in text

    def _saved(*bodies: str) -> tuple[int, list[str]]:
        waiting, printed = iter(bodies), []

        def wait(files: Files) -> str:
            printed.append("".join(capfd.readouterr()))
            body = next(waiting, None)
            if body is None:
                raise KeyboardInterrupt
            Path("tiny.py").write_text(text.replace(BODY, f"        {body}\n"))
            files.seen = files._look()
            return "tiny.py"

        monkeypatch.setattr(Files, "wait", wait)
        capfd.readouterr()
        return main([*RUN]), printed

    return _saved


def first_line(printed: str) -> str:
    """The line about the first case-run, without its time."""
    return next(line.partition(" s: ")[2] for line in printed.splitlines() if " s: " in line)


WRONG = "return paged_attention(q, *kv, plan) * (plan.max_q_len < 2)"


def test_each_save_runs_the_changed_backend_and_first_what_failed(saved) -> None:
    code, printed = saved(WRONG, "x = 1; " + WRONG, BODY.strip())
    assert first_line(printed[0]) == f"eager-{DECODE} passed"
    assert "PARTIAL" in printed[0]
    # Only the requests with several rows are wrong now.
    assert first_line(printed[1]) == f"eager-{DECODE} passed"
    assert f"{V2}: " in printed[1]
    assert "NOT CONFORMANT: 1 failed of 2 selected case-runs" in printed[1]
    assert first_line(printed[2]) == f"eager-{V2} failed"
    assert first_line(printed[3]) == f"eager-{V2} passed"
    assert "all passed" in printed[3]
    assert code == 0


def test_a_file_that_cannot_be_imported_is_reported_and_the_next_save_runs(saved) -> None:
    code, printed = saved("return (", BODY.strip())
    assert "SyntaxError" in printed[1]
    assert "watching 2 files" in printed[1]
    assert "all passed" in printed[2]
    assert code == 0


def test_ctrl_c_gives_the_exit_code_of_the_last_run(saved) -> None:
    assert saved(WRONG)[0] == 1


@pytest.mark.parametrize(
    "argv",
    [("--json", "out.json"), ("--since", "HEAD"), ("--in-process",), ("--budget", "3"), ("--lf",), ("-x",)],
    ids=lambda argv: argv[0],
)
def test_options_of_a_run_that_ends_are_refused(argv, capfd) -> None:
    assert main(["run", "-b", "torch_native", "--watch", *argv]) == 4
    assert f"--watch and {argv[0]} cannot be combined" in capfd.readouterr().err


def test_several_backends_are_refused(capfd) -> None:
    assert main(["run", "-b", "torch_native", "-b", "triton", "--watch"]) == 4
    assert "--watch runs one backend" in capfd.readouterr().err


def test_a_save_ends_a_run_between_two_case_runs() -> None:
    items = tuple(Item("a:B", "decode", execution, case) for case in "xyz" for execution in ("eager", "graph"))
    ran: list[list[str]] = []

    def run(plan, part):
        ran.append([f"{item.execution}-{item.case}" for item in part])
        yield from part

    prepared = SimpleNamespace(items=items, plan=None, judge=SimpleNamespace(run=run))
    failed = frozenset({("a:B", "graph", "z")})
    files = SimpleNamespace(have_changed=lambda: len(ran) == 3)
    list(in_parts(prepared, failed, 1, files))
    assert ran == [["graph-z"], ["eager-x", "graph-x"], ["eager-y", "graph-y"]]


def in_the_background(action: Callable[[], object]) -> None:
    def act() -> None:
        time.sleep(0.3)
        action()

    threading.Thread(target=act).start()


@pytest.mark.parametrize("inside", ["beside.py", "package/inner/deep.py"])
def test_files_of_the_folder_or_of_the_whole_package_are_watched(tmp_path, inside) -> None:
    for folder in (tmp_path / "package", tmp_path / "package" / "inner"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    file = tmp_path / inside
    file.write_text("1")
    (tmp_path / "alone.py").write_text("1")
    own = tmp_path / "alone.py" if inside == "beside.py" else tmp_path / "package" / "__init__.py"
    files = Files(own)
    assert not files.have_changed()
    in_the_background(lambda: file.write_text("22"))
    assert files.wait().endswith(file.name)
    assert not files.have_changed()
    # The same size, at another time.
    os.utime(file, ns=(1, 1))
    assert files.have_changed()


def test_what_is_not_of_the_backend_is_not_watched(tmp_path) -> None:
    (tmp_path / "alone.py").write_text("1")
    (tmp_path / "other").mkdir()
    files = Files(tmp_path / "alone.py")
    (tmp_path / "other" / "module.py").write_text("1")
    (tmp_path / "notes.txt").write_text("1")
    assert not files.have_changed()
    assert watch.POLL_S <= 0.2
