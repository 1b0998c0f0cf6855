"""Which check an exception fails, in every phase, and what is said about it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from attn_testkit.checks.failures import (
    context_lost,
    device_full,
    first_line,
    from_exception,
    is_foreign,
    reason_of,
    site_of,
)
from attn_testkit.contract import AttentionBackend
from attn_testkit.distributions import CORPUS, KIT, folder_of


def named(name: str, message: str = "it broke", **fields: Any) -> Exception:
    error = type(name, (Exception,), fields)(message)
    return error  # type: ignore[no-any-return]


SYNC = "called a synchronizing CUDA operation"
TABLE: list[tuple[str, Exception, str, bool, str, str, str]] = [
    ("shape", named("ShapeError", "8 rows"), "capture", True, "output-contract", "8 rows", ""),
    ("contract", named("ContractError", "fill is 5"), "fill value", True, "output-contract", "fill is 5", ""),
    (
        "full",
        named("OutOfMemoryError", "full. Process 3 has"),
        "forward",
        True,
        "completes",
        "forward: full.",
        "fewer --jobs",
    ),
    (
        "dangling",
        named("DanglingMemoryError"),
        "replay",
        True,
        "addresses-stable",
        "memory that no longer exists: it b",
        "fill it in place",
    ),
    (
        "capture",
        named("RuntimeError"),
        "capture",
        True,
        "captures-cleanly",
        "cannot be captured: it broke",
        "no .item()",
    ),
    (
        "sync by name",
        named("HostSyncError"),
        "plan for replay",
        False,
        "no-host-lengths",
        "waits for the device",
        "keep lengths",
    ),
    (
        "sync by text",
        named("E", SYNC),
        "plan for replay",
        False,
        "no-host-lengths",
        "waits for the device",
        "keep lengths",
    ),
    (
        "sync of a plan",
        named("E", SYNC),
        "plan",
        False,
        "no-host-lengths",
        "planning an eager step waits",
        "keep lengths",
    ),
    (
        "sync of a forward",
        named("E", SYNC),
        "forward",
        False,
        "no-host-lengths",
        "an eager forward waits",
        "keep lengths",
    ),
    ("sync before any batch", named("E", SYNC), "constructor", False, "completes", "raised E: called", ""),
    ("sync elsewhere", named("E", SYNC), "plan", True, "completes", "init_forward_metadata raised E: called", ""),
    (
        "none of anything",
        named("T", "NoneType"),
        "plan",
        False,
        "completes",
        "init_forward_metadata raised T: None",
        "",
    ),
    ("none, with mirrors", named("T", "NoneType"), "plan", True, "completes", "init_forward_metadata raised T", ""),
    *(
        (f"none in {phase}", named("T", "NoneType"), phase, False, "completes", "raised T: NoneType", "")
        for phase in ("constructor", "graph state", "verify mask", "fill value", "kernels")
    ),
    (
        "view",
        named("AttributeError"),
        "plan for replay",
        True,
        "completes",
        "before a replay raised Attr",
        "a view without extend_*",
    ),
    (
        "None for k",
        named("AttributeError", "'NoneType' object has no attribute 'view'"),
        "forward without k and v",
        False,
        "completes",
        "forward raised AttributeError",
        "takes_none_kv",
    ),
    ("attribute", named("AttributeError"), "plan", True, "completes", "raised AttributeError", ""),
    ("other in replay plan", named("KeyError"), "plan for replay", True, "completes", "raised KeyError", ""),
    (
        "lost",
        named("R", "device-side assert triggered"),
        "forward",
        True,
        "completes",
        "forward raised R",
        "appear late",
    ),
    ("an unknown phase", named("R"), "somewhere", True, "completes", "somewhere raised R: it broke", ""),
    ("no message", named("R", ""), "replay", True, "completes", "replay raised R: (no message)", ""),
]


@pytest.mark.parametrize(
    ("error", "phase", "needs", "check", "headline", "hint"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE]
)
def test_what_was_raised_where_says_which_check_fails(
    error: Exception, phase: str, needs: bool, check: str, headline: str, hint: str
) -> None:
    found = from_exception(error, phase, "a step", needs_cpu_lengths=needs)
    assert found.check == check
    assert headline in found.headline
    assert hint in found.hint
    assert bool(hint) is bool(found.hint)
    assert found.step == "a step"


@pytest.mark.parametrize(
    ("phase", "captured"),
    [("forward", True), ("forward without k and v", True), ("plan", False), ("plan for replay", False)],
)
def test_a_sync_of_what_a_graph_captures_too_is_said_to_stop_the_capture(phase: str, captured: bool) -> None:
    found = from_exception(named("HostSyncError"), phase, "a step", needs_cpu_lengths=False)
    assert found.hint.endswith(": a forward that waits cannot be captured") is captured


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("constructor", "the constructor"),
        ("graph state", "init_cuda_graph_state"),
        ("plan", "init_forward_metadata"),
        ("forward", "forward"),
        ("forward without k and v", "forward"),
        ("plan for capture", "init_forward_metadata_out_graph(in_capture=True)"),
        ("warm-up", "a warm-up before capture"),
        ("plan before capture", "init_forward_metadata_before_capture"),
        ("plan for replay", "init_forward_metadata_out_graph before a replay"),
        ("replay", "replay"),
        ("read back", "reading the results back"),
        ("verify mask", "verify_mask"),
        ("fill value", "get_cuda_graph_seq_len_fill_value"),
        ("kernels", "kernels"),
    ],
)
def test_a_phase_is_called_by_what_its_author_wrote(phase: str, words: str) -> None:
    assert from_exception(named("R"), phase, "", needs_cpu_lengths=True).headline == f"{words} raised R: it broke"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "an Illegal memory access was met",
        "unspecified launch failure",
        "misaligned address",
        "an illegal instruction was met",
        "hardware stack error",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_LAUNCH_FAILED",
    ],
)
def test_a_lost_context_is_known_by_thefirst_line(text: str) -> None:
    assert context_lost(RuntimeError(f"\n{text}\nmore"))
    assert not context_lost(RuntimeError(f"CUDA error: invalid argument\n{text}"))
    assert not context_lost(RuntimeError(""))


def test_a_full_device_is_said_without_the_list_of_its_processes() -> None:
    said = device_full(named("OutOfMemoryError", "no memory. Including non-PyTorch memory, Process 1 has"))
    assert said.startswith("no memory. If other programs")
    assert device_full(named("RuntimeError", "no memory")) == ""


def test_what_the_emulation_knows_comes_first() -> None:
    error = named("RuntimeError", "x\ny", operation="a copy", cuda="on CUDA it waits", cure="pin it", site="mine.py:3")
    found = from_exception(error, "capture", "", needs_cpu_lengths=True)
    assert found.headline == "cannot be captured: a copy"
    assert found.hint == "on CUDA it waits\npin it"
    assert found.where == "mine.py:3"
    assert first_line(error) == "x"


class Parent(AttentionBackend):
    def __init__(self) -> None:
        self.table = 1
        self.other.field = 2  # type: ignore[attr-defined]


class Child(Parent):
    forward = init_forward_metadata = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class Grandchild(Child):
    pass


def test_an_attribute_that_a_parents_constructor_sets_was_forgotten() -> None:
    for made, who in (
        (Child, "Child.__init__ did not call that of Parent, which sets table"),
        (Grandchild, "Grandchild.__init__ did"),
    ):
        with pytest.raises(AttributeError) as raised:
            made().table  # noqa: B018
        assert who in from_exception(raised.value, "plan", "", needs_cpu_lengths=True).hint
    with pytest.raises(AttributeError) as raised:
        Child().unheard_of  # noqa: B018  # type: ignore[attr-defined]
    assert from_exception(raised.value, "plan", "", needs_cpu_lengths=True).hint == ""
    with pytest.raises(AttributeError) as raised:
        object().table  # type: ignore[attr-defined]  # noqa: B018
    assert from_exception(raised.value, "plan", "", needs_cpu_lengths=True).hint == ""


def test_the_line_is_the_authors_innermost_of_what_was_raised_first() -> None:
    def inner() -> None:
        raise KeyError("inner")

    def outer() -> None:
        try:
            inner()
        except KeyError:
            raise ValueError("outer")  # noqa: B904

    def hides() -> None:
        try:
            inner()
        except KeyError:
            raise ValueError("outer") from None

    for call, where in ((outer, " in inner: raise KeyError"), (hides, " in hides: raise ValueError")):
        with pytest.raises(ValueError, match="outer") as raised:
            call()
        assert where in site_of(raised.value)
        assert site_of(raised.value).startswith("test_failures_by_hand.py:")
    assert site_of(ValueError("never raised")) == ""


REFUSED = """at 3:12:
def kernel(q, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    scores = tl.dott(q, at)
             ^
AttributeError("module 'triton.language' has no attribute 'dott'")"""


def test_of_a_message_of_many_lines_the_reason_is_shown() -> None:
    """The headline was `forward raised CompilationError: at 3:12:`."""
    found = from_exception(named("CompilationError", REFUSED), "forward", "", needs_cpu_lengths=True)
    assert found.headline == (
        "forward raised CompilationError: at 3:12: AttributeError(\"module 'triton.language' has no attribute 'dott'\")"
    )
    assert found.where.splitlines()[-1] == "line 3 of the kernel: scores = tl.dott(q, at)"
    for less in (REFUSED.replace("at 3:12:", "CompilationError:"), REFUSED.replace("             ^\n", "")):
        found = from_exception(named("CompilationError", less), "forward", "", needs_cpu_lengths=True)
        assert "of the kernel" not in found.where, "a line without a number, or a number without a line"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("CUDA error: invalid argument\nCUDA kernel errors might be reported later\nCompile with X", "CUDA error: inv"),
        ("it failed:\n\n   in the end\n   ^~~\n", "it failed: in the end"),
        ("it failed:", "it failed:"),
        ("it failed:\n  ^\n", "it failed:"),
        ("\n\none line", "one line"),
        ("", "(no message)"),
    ],
)
def test_the_first_line_is_the_reason_unless_it_only_announces_it(message: str, reason: str) -> None:
    assert reason_of(RuntimeError(message)).startswith(reason)
    assert len(reason_of(RuntimeError(message)).splitlines()) == 1


def test_an_error_of_no_known_place_has_none() -> None:
    assert site_of(TypeError("it takes none"), "plan") == ""
    assert site_of(TypeError("f() takes 1 positional argument but 2 were given"), "somewhere") == ""


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("no message from me")

    __repr__ = __str__


class Text(str):
    """A string of the backend's own class, which no message may hold."""


def test_an_exception_that_cannot_say_what_it_is_is_a_finding_all_the_same() -> None:
    found = from_exception(Mute(), "forward", "", needs_cpu_lengths=True)
    assert found.headline == "forward raised Mute: (no message: its __str__ raised SystemExit)"
    assert not context_lost(Mute())
    assert device_full(Mute()) == ""


def test_what_an_exception_says_is_plain_text() -> None:
    class Odd(Exception):
        site = operation = cuda = cure = property(lambda self: 1 / 0)

        def __str__(self) -> str:
            return Text("odd\x1b[2J\x00 \ud800")

    found = from_exception(Odd(), "forward", "", needs_cpu_lengths=True)
    assert type(found.headline) is str
    assert found.headline == "forward raised Odd: odd\\x1b[2J\\x00 \\ud800"


def test_a_message_of_any_length_is_cut_and_says_by_how_much() -> None:
    found = from_exception(RuntimeError("begin " + "x" * 2_000_000 + " end"), "forward", "", needs_cpu_lengths=True)
    assert len(found.headline) <= 600
    assert found.headline.startswith("forward raised RuntimeError: begin xxx")
    assert found.headline.endswith("xxx end")
    left_out = int(re.search(r"\[\.\.\. (\d+) characters left out \.\.\.\]", found.headline)[1])  # type: ignore[index]
    shown = len(found.headline) - len(f" [... {left_out} characters left out ...] ")
    assert left_out + shown == len("forward raised RuntimeError: begin ") + 2_000_000 + len(" end")


@pytest.mark.parametrize(
    ("path", "foreign"),
    [
        ("/x/site-packages/torch/a.py", True),
        ("/x/site-packages/triton/a.py", True),
        ("/x/runner_modes/eager.py", True),
        ("C:\\site-packages\\torch\\a.py", True),
        ("/x/site-packages/torchvision/a.py", False),
        ("/home/me/mine.py", False),
        ("KIT/running/case_runs/loop.py", True),
        ("KIT/backends/triton.py", False),
        ("KIT/examples/minimal.py", False),
        ("CORPUS/faults/dense.py", False),
    ],
)
def test_frames_that_an_author_cannot_mend_are_passed_over(path: str, foreign: bool) -> None:
    assert is_foreign(path.replace("KIT/", folder_of(KIT)).replace("CORPUS/", folder_of(CORPUS))) is foreign


class Planned(AttentionBackend):
    """Keeps a length on the host, or reads it at once, or trips over a None that is no length."""

    plan = None

    def keeps(self, batch: Any) -> None:
        self.longest = batch.seq_lens_cpu

    def reads(self, batch: Any) -> int:
        return int(max(length.item() for length in batch.seq_lens_cpu.unbind()))

    def sums(self, batch: Any) -> int:
        return batch.seq_lens_sum.bit_length()  # type: ignore[no-any-return]

    def uses(self, batch: Any) -> None:
        self.longest.max()

    forward = None  # type: ignore[assignment]


class Unplanned(AttentionBackend):
    """Names no length."""

    def uses(self, batch: Any) -> None:
        self.plan.table  # type: ignore[attr-defined]  # noqa: B018

    plan = forward = None  # type: ignore[assignment]


def tripped(kind: type, hook: str) -> tuple[str, str]:
    backend = object.__new__(kind)
    backend.longest = None
    batch = SimpleNamespace(seq_lens_cpu=None, seq_lens_sum=None)
    with pytest.raises((AttributeError, TypeError), match="NoneType") as caught:
        getattr(backend, hook)(batch)
    found = from_exception(caught.value, "plan", "", needs_cpu_lengths=False)
    return found.check, found.hint


def test_a_none_is_a_missing_length_where_the_authors_line_reads_one() -> None:
    for hook in ("reads", "sums"):
        check, hint = tripped(Planned, hook)
        assert check == "no-host-lengths"
        assert hint.startswith("needs.cpu_seq_lens is False")


def test_a_none_that_another_hook_left_may_be_one_and_is_no_verdict() -> None:
    check, hint = tripped(Planned, "uses")
    assert check == "completes"
    assert hint.startswith("if the missing value is a length: needs.cpu_seq_lens is False")
    assert tripped(Unplanned, "uses") == ("completes", "")
