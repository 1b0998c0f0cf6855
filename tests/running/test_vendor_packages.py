"""A package that is installed and broken is said to be that, with its line, and is no failure of the backend."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from attn_testkit.contract import ForwardMode, Requires
from attn_testkit.examples import MinimalBackend
from attn_testkit.running.hygiene.vendor_packages import broken_packages, module_of

BROKEN = "import os\n\nraise ImportError('libcudart.so.13: cannot open shared object file')\n"
SAID = "vendor-kernels 1.2 is installed and cannot be imported: ImportError: libcudart.so.13: cannot open shared object"
ADAPTER = """
from attn_testkit.contract import ForwardMode, Requires
from attn_testkit.examples import MinimalBackend

class Adapter(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes({needs})

    def run(self, q, kv, plan):
        if {imports}:
            import vendor_kernels
        return super().run(q, kv, plan)
"""


def install(folder: Path, init: str, version: str = "1.2", top: str = "vendor_kernels\nbenchmarks\n") -> None:
    """A distribution in a folder, as pip would lay it out."""
    info = folder / f"vendor_kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vendor-kernels\nVersion: {version}\n")
    (info / "top_level.txt").write_text(top)
    for module, text in (("vendor_kernels", init), ("benchmarks", "raise ImportError('needs a dashboard')")):
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(text)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("vendor_kernels", "benchmarks"):
        sys.modules.pop(name, None)


def declared(*packages: str, of_mode: tuple[str, ...] = ()):
    changes = {"mode_requires": {ForwardMode.DECODE: Requires(packages=of_mode)}} if of_mode else {}
    return MinimalBackend.capabilities.with_changes(requires=Requires(packages=packages), **changes)


@pytest.mark.parametrize("of_mode", [False, True])
def test_a_package_that_raises_where_it_is_imported_is_named_with_its_line(here: Path, of_mode: bool) -> None:
    install(here, BROKEN)
    needs = declared(of_mode=("vendor-kernels>=1",)) if of_mode else declared("vendor-kernels>=1")
    found = broken_packages(needs)
    assert list(found) == ["vendor-kernels>=1"]
    assert found["vendor-kernels>=1"].startswith(SAID)
    assert found["vendor-kernels>=1"].endswith("vendor_kernels/__init__.py:3)")
    assert "vendor_kernels" not in sys.modules


def test_also_one_that_ends_the_process_where_it_is_imported(here: Path) -> None:
    install(here, "raise SystemExit('no device')")
    assert "SystemExit: no device" in broken_packages(declared("vendor-kernels"))["vendor-kernels"]


@pytest.mark.parametrize("text", ["vendor-kernels>=1", "vendor-kernels>=9", "no-such-kernels"])
def test_one_that_imports_or_is_said_to_be_absent_otherwise_is_not_named(here: Path, text: str) -> None:
    install(here, "" if text.endswith(">=1") else BROKEN)
    assert broken_packages(declared(text)) == {}


@pytest.mark.parametrize(
    ("name", "top", "module"),
    [
        ("flashinfer-python", "b12x\nbuild_backend\nflashinfer\n", "flashinfer"),
        ("Vendor.Kernels", "benchmarks\nvendor_kernels\n", "vendor_kernels"),
        ("nvidia-other-dsl", "cutlass\n", ""),
        ("vendor", "vendor_kernels\n", ""),
        ("vendor-kernels-cu13", "vendor\nvendor_kernels\n", "vendor_kernels"),
    ],
)
def test_only_the_module_that_is_named_like_it_is_imported(tmp_path: Path, name: str, top: str, module: str) -> None:
    info = tmp_path / "x-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "top_level.txt").write_text(top)
    assert module_of(Distribution.at(info)) == module


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "attn_testkit", "run", "--backend", "adapter:Adapter", "--device", "cpu"]
    return subprocess.run(
        [*command, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_run_says_it_once_for_each_mode_and_blames_no_case_run(tmp_path: Path) -> None:
    install(tmp_path, BROKEN)
    needs = "requires=Requires(packages=('vendor-kernels>=1',))"
    (tmp_path / "adapter.py").write_text(ADAPTER.format(needs=needs, imports="True"))
    found = run(tmp_path, "--mode", "decode")
    assert found.returncode == 5, found.stdout + found.stderr
    assert found.stdout.count(f"not run here: {SAID}") == 2
    assert "__init__.py:3)" in found.stdout
    last = found.stdout.splitlines()[-1]
    assert last.startswith(f"NOTHING RAN: of 12 pairs of mode and execution 2 not runnable here ({SAID}")
    assert "failed" not in last


def test_a_mode_that_needs_it_is_not_run_and_the_others_are(tmp_path: Path) -> None:
    install(tmp_path, BROKEN)
    needs = "mode_requires={ForwardMode.DECODE: Requires(packages=('vendor-kernels',))}"
    (tmp_path / "adapter.py").write_text(ADAPTER.format(needs=needs, imports="False"))
    found = run(tmp_path, "--mode", "decode", "--mode", "draft-extend", "--execution", "eager")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(f"not run here: {SAID}") == 1
    assert found.stdout.splitlines()[-1].startswith("PARTIAL: ")
