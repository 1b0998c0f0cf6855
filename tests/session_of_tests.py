"""A session of this repository's tests: torch and its emulation, numbers, judges and cases that are made once.

The repository's ``conftest.py`` registers this plugin. A session that a test starts elsewhere may collect
``attn_testkit.suite`` from this repository, and does not have the plugin: it is one as users have it.
"""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Before any test file imports Triton, which makes its own functions for a GPU or for its interpreter, once.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where the tests run as a step of GitHub Actions, what is tested does not annotate that step.
os.environ.pop("GITHUB_ACTIONS", None)

_COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Variable that Inductor sets in a process where it first compiles. Judges would start in fresh interpreters after it,
because torch reads it when it starts."""
_given = os.environ.get(_COMPILER_FOLDER)

HERE = Path(__file__).parent

# A busy machine is slow, and slow is not wrong. What a pull request finds does not depend on luck.
hypothesis.settings.register_profile("kit", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("kit")

# Modules and items live until the end: the collector would look at all of them again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures draw
def pytest_runtest_setup() -> None:
    """A test draws the same numbers, and its judges are forked, whatever its process has run before."""
    torch.default_generator.manual_seed(0)
    from attn_testkit.catalogue.tiers import generate

    generate.cache.reads = True  # of ``cases_are_kept``, until a test empties it
    if _given is None:
        os.environ.pop(_COMPILER_FOLDER, None)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from slow_tests import slow_first

    slow_first(items)


@pytest.fixture(scope="session", autouse=True)
def judges_are_forked() -> Iterator[None]:
    """Judges are forks of a process that has imported torch, here and in what tests start: ``warm/warm_judge.py``."""
    import warm_judge

    from attn_testkit.running.processes import judge_process

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        place = f"{folder}/judges"
        code = "import sys; sys.path.insert(0, sys.argv[1]); import warm_judges; warm_judges.serve(sys.argv[2])"
        command = [sys.executable, "-c", code, str(HERE / "warm"), place]
        kept = subprocess.Popen(
            command, env=judge_process._environment("cpu"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert kept.stdout is not None
        assert kept.stdout.readline() == b"ready\n"
        patched.setenv(warm_judge.PLACE, place)
        patched.setenv("PYTHONPATH", str(HERE / "warm"), prepend=os.pathsep)
        patched.setattr(judge_process, "subprocess", warm_judge.namespace())
        yield
        kept.communicate()


@pytest.fixture(scope="session", autouse=True)
def cases_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The processes of a session build the cases of the same capabilities once: ``warm/kept_cases.py``."""
    from kept_cases import KeptCases

    from attn_testkit.catalogue.tiers import generate

    own = tmp_path_factory.getbasetemp()
    generate.cache.__class__ = KeptCases
    generate.cache.folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cases"
    generate.cache.folder.mkdir(exist_ok=True)


@pytest.fixture(autouse=True)
def judge_is_cold(request: pytest.FixtureRequest) -> None:
    """Marked ``cold``: judges start in fresh interpreters, as they do for users."""
    if request.node.get_closest_marker("cold"):
        request.getfixturevalue("monkeypatch").delenv("ATTN_WARM_JUDGES")


@pytest.fixture
def evaluated_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """``minimize`` and ``fuzz`` judge in the test's own process."""
    from judge_here import JudgeHere

    monkeypatch.setattr("attn_testkit.cli.one_by_one.JudgeProcess", JudgeHere)
