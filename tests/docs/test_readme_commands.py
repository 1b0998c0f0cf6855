"""The README's backend and the commands below it, on a kernel that somebody has: of one mode, else as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transcript import ROOT, fences

KERNEL = """

import torch


def my_kernel(q, k_pool, v_pool, page_table, kv_lens, cu_seqlens_q, scale):
    \"\"\"Paged attention of one row or several of each request, in plain torch.\"\"\"
    bs, rows = len(kv_lens), len(q) // len(kv_lens)
    keys, values = (pool[page_table.long()].flatten(1, 2).float() for pool in (k_pool, v_pool))
    heads = q.view(bs, rows, keys.shape[2], -1, q.shape[-1]).float()
    logits = torch.einsum("brhgd,bshd->bhgrs", heads, keys) * scale
    last = kv_lens[:, None] - rows + torch.arange(rows, device=q.device)
    seen = torch.arange(keys.shape[1], device=q.device) <= last[:, :, None]
    weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)
    return torch.einsum("bhgrs,bshd->brhgd", weights, values).reshape(q.shape).to(q.dtype)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the package that the README speaks of."""
    (shown,) = [fence.body for fence in fences(ROOT / "README.md") if fence.language == "python"]
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").touch()
    (tmp_path / "my_pkg" / "attn.py").write_text(shown + KERNEL)
    return tmp_path


def commands_of_a_backend() -> list[str]:
    (body,) = [f.body for f in fences(ROOT / "README.md") if "my_pkg" in f.body and f.language != "python"]
    return [line.partition("    #")[0].rstrip() for line in body.splitlines()]


NARROWED = (
    ("attn-testkit run --backend my_pkg.attn:MyBackend", ("", " --device cpu --mode decode --execution eager")),
    ("pytest --pyargs ", ("", " --attn-device=cpu --attn-mode=decode --attn-execution=eager")),
    ("python -c ", ("MyBackend'))", "MyBackend', device='cpu', modes=['decode'], executions=['eager']))")),
)
"""What a command begins with, and its end in place of which stands a selection."""


def test_every_command_of_the_fence_is_tried_here() -> None:
    found = commands_of_a_backend()
    assert len(found) == len(NARROWED)
    assert all(line.startswith(begin) for line, (begin, _) in zip(found, NARROWED, strict=True))


@pytest.mark.cold
@pytest.mark.parametrize("number", range(len(NARROWED)), ids=["run", "pytest", "check_backend"])
def test_a_backend_as_the_readme_writes_it_conforms_by_each_of_its_commands(project: Path, number: int) -> None:
    _, (end, instead) = NARROWED[number]
    line = commands_of_a_backend()[number]
    assert end in line
    command = line.replace(end, instead) if end else line + instead
    # As an installer writes it, since the environment of this test may have no such script.
    script = project / "bin" / "pytest"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys, pytest\nsys.exit(pytest.console_main())\n")
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    assert re.search(r"PARTIAL: 10 of \d+ planned case-runs ran, all passed; .*: no proof about hardware", done.stdout)
    assert "CONFORMANT" not in done.stdout


def test_the_one_liner_exits_with_1_for_a_broken_backend(project: Path) -> None:
    (command,) = [line for line in commands_of_a_backend() if line.startswith("python -c ")]
    wrong = "attn_testkit.examples:OffByOneBackend', device='cpu', modes=['decode'], executions=['eager']"
    command = command.replace("my_pkg.attn:MyBackend'", wrong).replace("python ", f"{sys.executable} ", 1)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NOT CONFORMANT" in done.stderr
