"""Compile the XQA kernels that the cases of a tier need, in parallel and before anything is timed.

    python ci/warmup_xqa.py --tier core
    python ci/warmup_xqa.py --tier core --mode decode --list

XQA is compiled for each combination of dtypes, page size, head dim, ratio, window and number of query rows: far more
than a tier meets, so the list is made from its cases. Each layer of a case counts: one may have a window and the other
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from attn_testkit.backends.trtllm_mha import XQABackend
from attn_testkit.backends.vendor.warmup import Family, compile_all
from attn_testkit.cases.case import Case
from attn_testkit.cases.co_residents import declared_co_residents
from attn_testkit.catalogue.tiers import TIERS, generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.data import DTYPES, make_layers


def _needed(case: Case) -> Iterator[Family]:
    dtype = DTYPES[case.dtype]
    kv_dtype = dtype if case.kv_dtype == "same" else DTYPES[case.kv_dtype]
    ratio = case.heads.q_heads // case.heads.kv_heads
    for window in sorted({layer.sliding_window_size >= 0 for layer in make_layers(case)}):
        for rows in _rows(case):
            arguments = (dtype, kv_dtype, case.page_size, case.head_dim, ratio, window, dtype, rows)
            yield Family("flashinfer.jit.xqa:gen_xqa_module", arguments)


def _rows(case: Case) -> tuple[int, ...]:
    """Query rows per request in the calls of a case."""
    if case.draft is None:
        return (case.width,)
    # Each branch is a request to the kernel. A loop also verifies a chain and its root, and extends as many.
    return (1, case.draft.steps + 1) if case.rounds else (1,)


def families(tier: str, modes: Sequence[ForwardMode]) -> list[Family]:
    """Kernels that the cases of a tier need, each once, in the order of the modes."""
    declared = XQABackend.capabilities
    found: dict[Family, None] = {}
    for mode in modes:
        for case in generate(declared, mode, tier):
            for each in [case, *(declared_co_residents(declared, case, declared.graph) if case.multi_mode else [])]:
                found.update(dict.fromkeys(_needed(each)))
    return list(found)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--tier", type=click.Choice(list(TIERS)), default="core", show_default=True)
@click.option("--mode", "modes", multiple=True, help="Default: every mode that XQA serves.")
@click.option("--list", "only_list", is_flag=True, help="Only print what would be compiled.")
@click.pass_context
def main(context: click.Context, tier: str, modes: tuple[str, ...], only_list: bool) -> None:
    chosen = [ForwardMode(m) for m in modes] or sorted(XQABackend.capabilities.eager)
    wanted = families(tier, chosen)
    if only_list:
        for family in wanted:
            click.echo(" ".join(str(argument) for argument in family.arguments))
        click.echo(f"{len(wanted)} kernels")
        return
    context.exit(compile_all(wanted))


if __name__ == "__main__":
    main()
