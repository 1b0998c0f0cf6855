"""Launches of a program, compiled for devices that this machine lacks: refusals, and the resources of each launch."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cuda_on_cpu.launch_log import LaunchNote

SHARED_MEMORY = {
    80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376,
}  # fmt: skip
"""Bytes that a block of a kernel may have, by compute capability. Source: CUDA C++ Programming Guide, technical
specifications ("maximum amount of shared memory per thread block")."""
TARGETS = tuple(f"sm{capability}" for capability in SHARED_MEMORY)
"""Names of devices that kernels can be compiled for."""
_THREADS, _REGISTERS, _TENSOR_MEMORY = 1024, 65_536, 512
"""Threads and registers of a block, columns of tensor memory: the same for all targets. Source: as above, and
``CompiledKernel._init_handles`` of Triton, which raises ``OutOfResources``."""
_SECONDS = 60.0


@dataclass(frozen=True)
class Compiled:
    """A launch that was compiled for a target."""

    target: str
    launch: LaunchNote
    refused: str = ""
    """The reason why the device cannot run the launch: the compiler's message, or its shared memory."""
    unknown: str = ""
    """The reason why it was not compiled."""
    shared: int = 0
    """Bytes of shared memory of a block."""
    registers: int | None = None
    """Registers of a thread; None without the tool that reports them."""
    stack: int | None = None
    """Bytes of local memory of a thread, where registers are spilled."""
    uses: tuple[str, ...] = ()
    """Instructions of tensor cores: wgmma, tcgen05."""
    threads: int = 0
    """Threads of a block."""
    tensor_memory: int = 0
    """Columns of tensor memory, from sm100 on."""

    def text(self) -> str:
        """One line."""
        if self.refused or self.unknown:
            return f"{self.target}: {self.launch.text()}: {self.refused or f'not compiled: {self.unknown}'}"
        facts = [f"{self.shared:,} bytes of shared memory"]
        facts += [] if self.registers is None else [f"{self.registers} registers"]
        facts += [f"{self.stack} bytes of stack"] if self.stack else []
        return f"{self.target}: {self.launch.text()}: {', '.join([*facts, *self.uses])}"


def compile_for(
    target: str, launches: Sequence[LaunchNote], seconds: float = _SECONDS, jobs: int | None = None
) -> Iterator[Compiled]:
    """Compile each launch in a process without TRITON_INTERPRET, and yield the results in order.

    ``target``: one of ``TARGETS``. ``seconds``: the longest that one launch may take. ``jobs``: number of processes, by
    default the number of cores. Triton caches the compiled kernels itself.
    """
    waiting = deque(enumerate(launches))
    answers: list[queue.SimpleQueue[Compiled]] = [queue.SimpleQueue() for _ in launches]
    count = min(len(launches), jobs or len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=_work, args=(target, waiting, seconds, answers)) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for answer in answers:
            yield answer.get()
    finally:
        waiting.clear()
        for thread in threads:
            thread.join()


def _work(
    target: str,
    waiting: deque[tuple[int, LaunchNote]],
    seconds: float,
    answers: Sequence[queue.SimpleQueue[Compiled]],
) -> None:
    """Compile waiting launches until none is left, in a process that is restarted if a launch ended it."""
    while waiting:
        with _Worker(target) as worker:
            while True:
                try:
                    place, launch = waiting.popleft()
                except IndexError:
                    return
                answer = None if launch.why_not else worker.ask(launch, seconds)
                if answer is None:
                    reason = launch.why_not or worker.reason(seconds)
                    answers[place].put(Compiled(target, launch, unknown=reason))
                    if not launch.why_not:
                        break
                else:
                    answers[place].put(_judged(target, launch, answer))


def _judged(target: str, launch: LaunchNote, answer: dict[str, object]) -> Compiled:
    if "refused" in answer or "unknown" in answer:
        return Compiled(target, launch, **answer)  # type: ignore[arg-type]
    made = Compiled(target, launch, uses=tuple(answer.pop("uses")), **answer)  # type: ignore[arg-type]
    needs = (
        (made.shared, SHARED_MEMORY[int(target.removeprefix("sm"))], "bytes of shared memory"),
        (made.threads, _THREADS, "threads"),
        (made.threads * (made.registers or 0), _REGISTERS, "registers"),
        (made.tensor_memory, _TENSOR_MEMORY, "columns of tensor memory"),
    )
    too_much = [
        f"it needs {need:,} {what}, and a block has {most:,} at most" for need, most, what in needs if need > most
    ]
    return replace(made, refused=too_much[0]) if too_much else made


class _Worker:
    """A process that compiles one launch after another."""

    def __init__(self, target: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "cuda_on_cpu.compile_worker"], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._said: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        reads = self._read_answers, self._read_errors
        self._threads = [threading.Thread(target=read, daemon=True) for read in reads]
        for thread in self._threads:
            thread.start()
        self._write(target)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def ask(self, launch: LaunchNote, seconds: float) -> dict[str, object] | None:
        """The worker's answer; None if there was none in time, or the worker ended."""
        known = len(self._errors)
        self._write(json.dumps([launch.kernel, launch.module, launch.file, launch.args, dict(launch.kwargs)]))
        try:
            line = self._said.get(timeout=seconds)
        except queue.Empty:
            return None
        answer: dict[str, object] | None = json.loads(line) if line else None
        if answer and "PassManager" in str(answer.get("refused", "")):
            # The compiler writes the reason to its error stream.
            said = [each.partition("error: ")[2] for each in self._errors[known:] if "error: " in each]
            answer["refused"] = said[0] if said else answer["refused"]
        return answer

    def reason(self, seconds: float) -> str:
        """The reason why there was no answer."""
        code = self._process.poll()
        if code is None:
            return f"the compiler did not end within {seconds:.0f} s"
        return " ".join(self._errors[-1:]) or f"the compiler ended with {code}"

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            self._process.wait()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._said.put(line)
        self._said.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(line.strip() for line in self._process.stderr if line.strip())
