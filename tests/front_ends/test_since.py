"""``run --map``, ``--since`` and ``--changed``: only what a change may reach runs, and at least one case-run for each
check and feature."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from attn_testkit.cli import main

HELPERS = """import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def copied(x):
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out
"""
DECODE = (
    "decode-mha2-d64-bf16-p16-k5.9-contiguous-gauss-b2prod",
    "decode-mha2-d64-bf16-p16-k7.9-contiguous-gauss-b2prod",
)
V2 = "draft-extend-v2-mha2-d64-bf16-p16-k5.9-n2a1x2-contiguous-gauss-b2prod"
CASES = [word for case in (*DECODE, V2) for word in ("--case", case)]


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.email=a@b.c", "-c", "user.name=a", *arguments], check=True)


def edit(file: str, before: str, after: str) -> None:
    text = Path(file).read_text()
    assert text.count(before) == 1
    Path(file).write_text(text.replace(before, after))


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of a backend, in which only requests with several rows use a kernel, with a map of three cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTN_TESTKIT_CACHE", raising=False)
        patch.chdir(tmp_path_factory.mktemp("mapped"))
        main(["new", "tiny", "--into", "."])
        Path("helpers.py").write_text(HELPERS)
        edit("tiny.py", "import torch\n", "import torch\nfrom helpers import copied\n")
        edit(
            "tiny.py",
            "        return paged_attention(q, *kv, plan)\n",
            "        out = paged_attention(q, *kv, plan)\n        return copied(out) if plan.max_q_len > 1 else out\n",
        )
        git("init", "-q")
        git("add", "-A")
        git("commit", "-q", "-m", "first")
        assert main(["run", "tiny.py", "--device", "cpu", "--execution", "eager", *CASES, "--map"]) == 0
        return Path.cwd()


@pytest.fixture
def call(mapped, capfd, monkeypatch, tmp_path):
    """Call ``run`` in a copy of that checkout: (exit code, stdout, stderr, case-runs of the results file)."""
    folder = tmp_path / "copy"
    shutil.copytree(mapped, folder)
    # The map has the folder of the checkout.
    file = folder / ".attn_testkit_cache" / "reach.json"
    file.write_text(file.read_text().replace(str(mapped), str(folder)))
    monkeypatch.delenv("ATTN_TESTKIT_CACHE", raising=False)
    monkeypatch.chdir(folder)

    def _call(*argv: str) -> tuple[int, str, str, list[str]]:
        capfd.readouterr()
        run = ["run", "tiny.py", "--device", "cpu", "--execution", "eager", *CASES, "--json", "out.json", *argv]
        code = main(run)
        out, err = capfd.readouterr()
        rows = json.loads(Path("out.json").read_text())["results"] if Path("out.json").exists() else []
        return code, out, err, [row["case"] for row in rows if row["case"]]

    return _call


def test_a_changed_kernel_is_tested_by_what_reaches_it_and_cases_that_do_not_are_left_out(call) -> None:
    edit("helpers.py", "tl.load(x + at, mask=at < n)", "tl.load(x + at, mask=at < n) * 2")
    code, out, err, ran = call("--changed")
    assert code == 1
    assert f"{V2}: " in out
    assert "--changed: copy_kernel changed; 1 case-runs may reach it, 1 more for each check and feature" in err
    assert "PARTIAL, 2 of 3 run" in err
    # One of the two decode cases: the mode has one, though neither reaches the kernel.
    assert sorted(ran) in [sorted([V2, case]) for case in DECODE]
    assert out.splitlines()[-1].startswith("NOT CONFORMANT: 1 failed of 2 selected case-runs")


def test_a_revision_is_compared_with_the_files_as_they_are(call) -> None:
    edit("helpers.py", "BLOCK=64)", "BLOCK=64, num_warps=4)")
    git("commit", "-qam", "second")
    code, out, err, ran = call("--since", "HEAD~1")
    assert (code, len(ran)) == (0, 2)
    assert "--since HEAD~1: copied changed; 1 case-runs may reach it" in err
    assert out.splitlines()[-1].startswith("PARTIAL: ")
    assert "all passed" in out.splitlines()[-1]
    assert ", --since HEAD~1" in out.splitlines()[-1]
    code, _, err, ran = call("--changed")
    assert code == 0
    assert "no function that was imported has changed; 0 case-runs may reach it" in err
    assert {case.partition("-mha")[0] for case in ran} == {"decode", "draft-extend-v2"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--since", "nowhere"), "has no revision 'nowhere'; `git log` lists those that there are"),
        (("--since", "--output=x"), "has no revision '--output=x'"),
        (("--since", "HEAD", "--changed"), "--changed is --since HEAD; give one of them"),
        (("--map", "--in-process"), "--map notes what a worker runs, and --in-process has none"),
        (("--changed", "--ray"), "--ray and --changed cannot be combined"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(call, argv, message) -> None:
    code, _, err, _ = call(*argv)
    assert code == 4
    assert message in err.splitlines()[-1]


def test_without_git_or_without_a_map_the_message_says_what_to_do(call) -> None:
    shutil.rmtree(".git")
    code, _, err, _ = call("--changed")
    assert code == 4
    assert "is not a Git checkout, so nothing says what has changed there" in err
    Path(".attn_testkit_cache", "reach.json").write_text("{")
    code, _, err, _ = call("--changed")
    assert code == 4
    assert "there is no map of tiny:TinyBackend in .attn_testkit_cache/reach.json" in err
    assert "make one: attn-testkit run -b tiny:TinyBackend --tier smoke --map" in err


def test_files_that_are_not_python_concern_everything_if_they_are_next_to_what_is_imported(call) -> None:
    Path("notes.md").write_text("nothing to run")
    assert "no function that was imported has changed" in call("--changed", "--collect-only")[2]
    Path("results.json").write_text("{}")
    assert "no function that was imported has changed" in call("--changed", "--collect-only")[2]
    Path("kernel.cu").write_text("__global__ void copy();")
    _, out, err, _ = call("--changed", "--collect-only")
    assert "kernel.cu has changed; 3 case-runs may reach it" in err
    assert len(out.splitlines()) == 3
