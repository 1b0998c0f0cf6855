"""Length and cost of a red run: lines, causes and seconds for twenty small mistakes, each in an adapter that passes.

    python ci/bench_red.py                          # all of them, at smoke on a CPU
    python ci/bench_red.py --only 'adapter-*' --keep results

Each mistake is one edit of a file that passes: the adapter that ``attn-testkit new`` writes, or the bundled ``triton``
or ``torch_native``. The edited file is run as a user would run it, in its own folder. Printed are the lines on
stdout, the causes that the report counts, the seconds of the run, those that are diagnosis, and how many times the file
without the edit takes, which is run right before each mistake: on a busy machine only neighbors compare. The last
column compares the run with itself without diagnosis, so load does not matter.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import attn_testkit
from attn_testkit.reports.grouping import group_failures
from attn_testkit.reports.record import read_report
from attn_testkit.results.case_result import BAD

__all__ = ["MISTAKES", "Measured", "Mistake", "measure"]

PACKAGE = Path(attn_testkit.__file__).parent


@dataclass(frozen=True)
class Mistake:
    """One edit of one file of an adapter."""

    name: str
    """``ADAPTER-WHAT``."""
    old: str
    """Text that occurs once in the file."""
    new: str
    file: str = ""
    """Name of the edited file; empty: the adapter's own."""

    @property
    def adapter(self) -> str:
        """Name of the adapter: a key of ``ADAPTERS``."""
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter that passes, as files of one folder."""

    module: str
    backend: str
    """Name of its class."""
    modes: tuple[str, ...]
    """Runner modes to run; empty: all that are declared."""

    def files(self) -> Mapping[str, str]:
        """File name -> text."""
        if self.module == "adapter":
            return {"adapter.py": _new_adapter()}
        names = [path.name for path in (PACKAGE / "backends").glob(f"{self.module}*.py")]
        texts = {name: (PACKAGE / "backends" / name).read_text("utf-8") for name in names}
        own = {f"from .{name[:-3]} import": f"from my_{name[:-3]} import" for name in names}
        return {f"my_{name}": _replaced(text, own) for name, text in texts.items()}

    @property
    def spec(self) -> str:
        """The spec that names the class in the folder."""
        return f"{'' if self.module == 'adapter' else 'my_'}{self.module}:{self.backend}"


ADAPTERS = {
    "adapter": Adapter("adapter", "MyBackend", ()),
    "triton": Adapter("triton", "TritonBackend", ("decode",)),
    "native": Adapter("torch_native", "TorchNativeBackend", ("decode", "extend")),
}
_RUN = "        return paged_attention(q, *kv, plan)\n"
_KERNELS = "my_triton_kernels.py"
MISTAKES = (
    Mistake("adapter-last-key", "slots <= position", "slots < position"),
    Mistake("adapter-one-key-more", "slots <= position", "slots <= 1 + position"),
    Mistake("adapter-row-subtracted", "first_new[request] + row", "first_new[request] - row"),
    Mistake("adapter-request-side", "row, right=True)", "row, right=False)"),
    Mistake("adapter-scale-inverse", "keys) * plan.layer.scaling", "keys) / plan.layer.scaling"),
    Mistake("adapter-keys-as-values", "values = v[pages]", "values = k[pages]"),
    Mistake(
        "adapter-mask-of-values", "masked_fill(~visible[:, :, None, None]", "masked_fill(visible[:, :, None, None]"
    ),
    Mistake(
        "adapter-ticket-kept",
        _RUN,
        "        if not hasattr(self, 'ticket'):\n"
        "            self.ticket = torch.zeros(1, device=q.device)\n"
        "        self.ticket += 1\n"
        "        last = self.ticket <= len(self.context.layers)\n"
        "        return torch.where(last, paged_attention(q, *kv, plan), 0.0)\n",
    ),
    Mistake(
        "adapter-host-maximum",
        _RUN,
        "        most = int(plan.kv_lens.max())\n        assert most\n" + _RUN,
    ),
    Mistake(
        "adapter-lengths-by-value",
        _RUN,
        "        lens = plan.kv_lens\n"
        "        if torch.cuda.is_current_stream_capturing():\n"
        "            self.lens = lens = getattr(self, 'lens', torch.full_like(lens, 9))[: len(lens)]\n"
        "        from dataclasses import replace\n"
        "        plan = replace(plan, step=replace(plan.step, kv_lens=lens))\n" + _RUN,
    ),
    Mistake("triton-key-past-end", "owned = key < end ", "owned = key <= end ", _KERNELS),
    Mistake("triton-stride-added", "slot * k_slot, slot * v_slot", "slot + k_slot, slot * v_slot", _KERNELS),
    Mistake("triton-shrink-added", "total = total * shrink", "total = total + shrink", _KERNELS),
    Mistake("triton-window-edge", "[None, :] >= (position", "[None, :] > (position", _KERNELS),
    Mistake(
        "triton-offset-out-of-bounds", "cu_seqlens_q_ptr + request + 1)", "cu_seqlens_q_ptr + request + 9)", _KERNELS
    ),
    Mistake("triton-lens-reallocated", "static.kv_lens[:forwards, :bs].copy_(fresh.kv_lens)", "fresh.kv_lens"),
    Mistake("native-window-edge", "<= layer.sliding_window_size)", "< layer.sliding_window_size)"),
    Mistake("native-cap-inverse", "tanh(logits / layer.logit_cap)", "tanh(logits * layer.logit_cap)"),
    Mistake("native-scale-of-values", "out * layer.v_scale", "out / layer.v_scale"),
    Mistake("native-row-place", "request * width + (row", "request * width - (row"),
)


def _new_adapter() -> str:
    text = (PACKAGE / "cli" / "new_adapter.py.j2").read_text("utf-8")
    return text.replace("{{ class }}", "MyBackend")


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text.replace("from ..contract import", "from attn_testkit.contract import")


@dataclass(frozen=True)
class Measured:
    """One run of a mistake, or of an adapter without one."""

    name: str
    lines: int
    causes: tuple[str, ...]
    failures: int
    seconds: float
    diagnosis: float
    """Seconds of it that looked for causes."""
    stdout: str


def measure(name: str, *, folder: Path, options: Sequence[str] = ()) -> Measured:
    """Run a mistake, or an adapter by its name, in ``folder``."""
    mistake = next((each for each in MISTAKES if each.name == name), None)
    adapter = ADAPTERS[mistake.adapter if mistake else name]
    files = dict(adapter.files())
    if mistake:
        edited = mistake.file or f"{adapter.spec.partition(':')[0]}.py"
        assert files[edited].count(mistake.old) == 1, f"{name}: {mistake.old!r} is not in {edited} once"
        files[edited] = files[edited].replace(mistake.old, mistake.new)
    for file, text in files.items():
        (folder / file).write_text(text, "utf-8")
    modes = [f"--mode={mode}" for mode in adapter.modes]
    command = ["run", "--backend", adapter.spec, "--device", "cpu", "--json", "results.json", *modes, *options]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "attn_testkit", *command],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    seconds = time.monotonic() - started
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr}")
    results = read_report(folder / "results.json").results
    failures = [result for result in results if result.case and result.status in BAD]
    diagnosis = sum(result.seconds.get("diagnosis", 0.0) for result in results)
    causes = tuple(f"{len(group.results)} {group.cause} [{group.check}]" for group in group_failures(failures))
    return Measured(name, len(done.stdout.splitlines()), causes, len(failures), seconds, diagnosis, done.stdout)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--only", default="*", metavar="GLOB", help="Only these mistakes.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep the folders of the runs here.")
@click.option("--option", "options", multiple=True, metavar="OPTION", help="Another option of `run`; repeatable.")
def main(only: str, keep: Path | None, options: tuple[str, ...]) -> None:
    """Measure each mistake, and each adapter without one."""
    chosen = [mistake.name for mistake in MISTAKES if fnmatch.fnmatch(mistake.name, only)]
    found: list[Measured] = []
    ratios: list[float] = []
    heads = ("failures", "causes", "lines", "green s", "red s", "diagnosis", "x green", "x itself")
    print(f"{'mistake':<30}{''.join(f'{head:>10}' for head in heads)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen:
            runs = []
            for each in (name.partition("-")[0], name):
                folder = (keep or Path(temporary)) / name / each
                folder.mkdir(parents=True, exist_ok=True)
                runs.append(measure(each, folder=folder, options=options))
                (folder / "stdout.txt").write_text(runs[-1].stdout, "utf-8")
            green, got = runs
            found.append(got)
            ratios.append(got.seconds / green.seconds)
            numbers = (got.failures, len(got.causes), got.lines)
            itself = got.seconds / (got.seconds - got.diagnosis)
            seconds = (green.seconds, got.seconds, got.diagnosis, ratios[-1], itself)
            times = "".join(f"{each:>10.1f}" for each in seconds)
            print(f"{name:<30}{''.join(f'{number:>10}' for number in numbers)}{times}", flush=True)
            for cause in got.causes:
                print(f"    {cause[:150]}", flush=True)
    one, short = sum(len(got.causes) == 1 for got in found), sum(got.lines <= 40 for got in found)
    fast = sum(ratio <= 1.5 for ratio in ratios)
    print(f"of {len(found)}: {one} with one cause, {short} with at most 40 lines, {fast} in at most 1.5 times green")


if __name__ == "__main__":
    main()
