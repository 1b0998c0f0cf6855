"""What ``run --ray`` refuses, in one line; no Ray is needed for it."""

from __future__ import annotations

import importlib

import pytest

from attn_testkit.cli import main
from attn_testkit.cluster.tasks import Collector, architecture_of
from attn_testkit.results.case_result import CaseResult, Status


@pytest.mark.parametrize(
    ("more", "option"),
    [
        (("--shard", "1/2"), "--shard"),
        (("--budget", "60"), "--budget"),
        (("--rest-of", "out.json"), "--rest-of"),
        (("--in-process",), "--in-process"),
        (("-k", "graph"), "-k"),
        (("--lf",), "--lf"),
        (("--collect-only",), "--collect-only"),
    ],
)
def test_options_that_a_cluster_cannot_have_are_named(capsys, tmp_path, monkeypatch, more, option):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-b", "torch_native", "--ray", *more]) == 4
    assert capsys.readouterr().err == (f"attn-testkit: --ray and {option} cannot be combined; leave one of them out\n")


def test_without_ray_the_extra_is_named(capsys, monkeypatch):
    real = importlib.import_module

    def without_ray(name: str, *rest: str):
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without_ray)
    assert main(["run", "-b", "torch_native", "--ray"]) == 4
    error = capsys.readouterr().err
    assert error == (
        "attn-testkit: --ray needs Ray, and No module named 'ray'; "
        "pip install 'PATH_OF_THE_CHECKOUT[ray]' on every node\n"
    )


def test_a_shard_that_ran_twice_counts_once_and_what_is_taken_does_not_come_again():
    collector = Collector()
    first = CaseResult("b", "decode", "eager", "decode-1", Status.PASSED, node="a")
    collector.add(first)
    assert collector.take() == [first]
    collector.add(CaseResult("b", "decode", "eager", "decode-1", Status.FAILED, node="b"))
    collector.add(other := CaseResult("b", "decode", "graph", "decode-1", Status.PASSED, node="b"))
    assert collector.take() == [other]
    assert collector.finished() == {("b", "eager", "decode-1"), ("b", "graph", "decode-1")}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("NVIDIA H200 sm90", "sm90"),
        ("NVIDIA B200 sm100", "sm100"),
        ("NVIDIA GB10 sm121a", "sm121a"),
        ("CPU (emulated CUDA)", "CPU (emulated CUDA)"),
    ],
)
def test_the_architecture_is_what_kernels_are_compiled_for(name, architecture):
    assert architecture_of(name) == architecture
