"""Programs that run as one leave the bits, and raise the errors, of programs that run one after another."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch

from cuda_on_cpu import EmulationError, Policy, confine, emulated_cuda, scratch, triton_programs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")
bench = importlib.import_module("bench_kernel")
WAYS = ("one_by_one", "together")
PAIRS = [
    pytest.param(pair, id=re.sub(r"\W+", "-", f"{name}-{pair.name}"))
    for name in ("bounds_programs", "lane_programs", "race_programs")
    for pair in importlib.import_module(name).PAIRS
]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many programs ran together, and one by one."""
    found = {"together": 0, "alone": 0}
    together, alone = triton_programs._Grid._run_together, triton_programs._Grid._run_one

    def counted(self, indices):
        done = together(self, indices)
        found["together"] += len(indices) if done == len(indices) else 0
        return done

    def counted_alone(self, index):
        found["alone"] += 1
        alone(self, index)

    monkeypatch.setattr(triton_programs._Grid, "_run_together", counted)
    monkeypatch.setattr(triton_programs._Grid, "_run_one", counted_alone)
    return found


def left(pair, wrong: bool, way: str, grid: tuple[int, ...]) -> list[object]:
    """The bits of every argument after a program was launched, and what it raised."""
    policy = Policy(programs=way, bounds=getattr(pair, "bounds", "storage"), masked_loads="poison")
    kernel = pair.kernel if wrong else (getattr(pair, "right_kernel", None) or pair.kernel)
    options = {**dict(pair.options), **({} if wrong else dict(getattr(pair, "right_options", ())))}
    with torch.no_grad(), emulated_cuda(policy):
        given, raised = (pair.wrong if wrong else pair.right)(), ""
        confine(*(given[place] for place in getattr(pair, "confined", ())))
        try:
            for _ in range(3):  # noted down, then together
                kernel[grid](*given, **options)
        except EmulationError as error:
            raised = re.sub(r"\b\d{9,}\b", "ADDRESS", str(error))
        tensors = [value.cpu() for value in given if isinstance(value, torch.Tensor)]
        tensors = [value for value in tensors if value.dtype != torch.int64 or value.max() < 1 << 32]  # no addresses
        return [raised, *[value.contiguous().view(-1).view(torch.uint8).tolist() for value in tensors]]


@pytest.mark.parametrize("pair", PAIRS)
def test_labelled_programs_leave_the_same_bits_and_raise_the_same_errors(pair):
    grid = getattr(pair, "grid", 1)
    grid = grid if isinstance(grid, tuple) else (grid,)
    # The right program is noted down, so that the first wrong one is not.
    one, other = ([left(pair, wrong, way, grid) for wrong in (False, True)] for way in WAYS)
    assert one == other


def follow(way: str, seed: int, rows: int, block: int) -> list[torch.Tensor]:
    """A kernel with a loop and a branch that differ between its programs."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 90, (rows,), generator=generator, dtype=torch.int32)
    flags = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.int32)
    x = torch.randn(rows, 96, generator=generator)
    with torch.no_grad(), emulated_cuda(Policy(programs=way)):
        x, lens, flags, out = (each.cuda() for each in (x, lens, flags, torch.zeros(rows, block)))
        for _ in range(3):
            kernels.follow[(rows,)](x, lens, flags, out, rows - 1, 0.7, 96, BACK=20, BLOCK=block)
        return [out.cpu()]


def paged(way: str, seed: int, rows: int, block: int) -> list[torch.Tensor]:
    """Attention over pages: sums, exponentials, masks of rows."""
    with torch.no_grad(), emulated_cuda(Policy(programs=way)):
        given = bench.problem("cuda")
        given[5].copy_(torch.tensor([64, 17 + seed, 1, 64], dtype=torch.int32))
        for _ in range(3):
            bench.launch(given)
        return [given[3].cpu()]


def transposed(way: str, seed: int, rows: int, block: int) -> list[torch.Tensor]:
    """Products and sums of what lies otherwise in memory."""
    x = torch.randn(rows, 32, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad(), emulated_cuda(Policy(programs=way)):
        x, out = x.cuda(), torch.zeros(rows, 64, device="cuda")
        for _ in range(3):
            kernels.sum_of_transposed[(rows,)](x, out, 0.7, M=32, N=64)
        return [out.cpu()]


@pytest.mark.parametrize("run", [follow, paged, transposed])
@pytest.mark.parametrize("seed", range(3))
def test_programs_of_several_paths_run_together_and_leave_the_same_bits(run, seed, ran):
    alone, together = (run(way, seed, rows=24, block=8) for way in WAYS)
    for one, other in zip(alone, together, strict=True):
        assert one.any()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert ran["together"] > 0


def test_programs_of_a_known_path_are_not_run_one_by_one(ran):
    with torch.no_grad(), emulated_cuda():
        x = torch.zeros(400, device="cuda")
        for step in (1.0, 2.0):
            kernels.add_blocked[(100,)](x, step, BLOCK=4)
        assert x.tolist() == [3] * 400
    assert ran["alone"] <= 2
    assert ran["together"] >= 198


def test_programs_that_read_what_others_write_run_in_their_order(ran):
    """Without a detector of races nothing would say that they meet, so they do not run together."""
    for policy in (Policy(races=False), Policy(programs="one_by_one")):
        with torch.no_grad(), emulated_cuda(policy):
            x = torch.zeros(80, device="cuda")
            kernels.add_blocked[(20,)](x, 1.0, BLOCK=4)
            kernels.add_blocked[(20,)](x, 1.0, BLOCK=4)
    assert ran["together"] == 0


def test_programs_that_meet_in_scratch_meet_in_their_order(ran):
    pair = next(each for each in importlib.import_module("race_programs").PAIRS if each.name == "padded rows of slot 0")
    found = []
    for way in WAYS:
        with torch.no_grad(), emulated_cuda(Policy(programs=way)):
            x, to, out = pair.wrong()
            scratch(out[0])
            for _ in range(4):
                pair.kernel[pair.grid](x, to, out, **dict(pair.options))
            found.append(out.tolist())
    assert found[0] == found[1]
    assert ran["together"] == 0


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'together' or 'one_by_one'"):
        Policy(programs="both")
