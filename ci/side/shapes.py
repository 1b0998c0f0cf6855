"""The shapes of SGLang's dense cases, as data, and the same shapes in ids of this kit. Without SGLang."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.rows import Accepted, Decode, Extend, Rows, Verify
from attn_testkit.cases.trees import Tree, chain
from attn_testkit.contract import ForwardMode

HEAD_DIM = 16
"""Of every dense case of SGLang's kit that its tests of Triton and torch_native run, in fp16."""

CHECKED = {
    "dense": 1, "decode-graph": 2, "verify": 1, "verify-graph": 2, "v2-graph": 1, "v2-runner": 1, "draft-runner": 1,
    "mtp-runner": 1, "split-op": 2,
}  # fmt: skip
"""Which of SGLang's functions runs a case -> how many forwards of it are held against something: a reference, or with
the production runners, which end in ``-runner``, an eager run. A draft of several forwards counts once."""

OWN_LISTS = {
    "triton": ("make_dense_cases", "make_swa_no_prefix_input_config_cases", "make_swa_prefix_input_config_cases"),
    "torch_native": ("make_dense_cases",),
}
"""Lists of cases of kind ``dense`` that the wheel has, as functions of the backend's name."""


@dataclass(frozen=True)
class Shape:
    """One case of SGLang's kit. Lengths are in tokens."""

    name: str
    """Its seed comes from the length of this."""
    kind: str
    """A key of ``CHECKED``."""
    mode: str
    """As this kit calls it."""
    prefixes: tuple[int, ...]
    """KV tokens of each request before the step."""
    new: tuple[int, ...] = ()
    """New tokens of each request; empty in decode."""
    page_size: int = 16
    q_heads: int = 4
    kv_heads: int = 4
    window: int = -1
    """W: a row at position p sees p - W .. p; -1 without."""
    topk: int = 1
    """Verify: above 1 a tree of three nodes, the root and two children."""
    layout: str = "shuffled_pages"
    bucket: int = 4
    """Batch size of the graph, where there is one."""
    padding: str = "small_real"
    options: tuple[tuple[str, object], ...] = ()
    """Further arguments of SGLang's function."""

    @property
    def executions(self) -> tuple[str, ...]:
        """What it tries: eager steps, a graph or both."""
        if self.kind in ("dense", "verify", "split-op"):
            return ("eager",)
        return ("graph",) if self.kind in ("v2-graph", "mtp-runner") else ("eager", "graph")

    @property
    def case(self) -> Case | None:
        """The same as a case of this kit; None for what ``sglang:triton`` and ``sglang:torch_native`` do not have: a
        draft's loop, which is another class, and piecewise graphs.
        """
        if self.kind in ("split-op", "draft-runner", "mtp-runner"):
            return None
        bucket = len(self.prefixes) if self.executions == ("eager",) else self.bucket
        return Case(
            self._rows(bucket), _heads(self.q_heads, self.kv_heads), HEAD_DIM, "fp16", self.page_size,
            self.prefixes, layout=_LAYOUTS[self.layout], kv_layout="custom", window=self.window,
            layer_windows="any" if self.window < 0 else "one", usual_scaling=True, bucket=bucket,
            padding=_PADDINGS[self.padding],
        )  # fmt: skip

    def _rows(self, bucket: int) -> Rows:
        mode, rows = ForwardMode(self.mode), self.new[0] if self.new else 1
        if mode is ForwardMode.TARGET_VERIFY:
            return Verify(chain(rows) if self.topk == 1 else Tree((0,) * (rows - 1)))
        if mode is ForwardMode.EXTEND:
            return Extend(self.new, -(-sum(self.new) // bucket))
        return Accepted(self.new, rows, v2=mode is ForwardMode.DRAFT_EXTEND_V2) if self.new else Decode()


_LAYOUTS = {"shuffled_pages": "shuffled", "interleaved_pages": "interleaved", "non_monotonic_extend": "reversed"}
_PADDINGS = {"small_real": "small", "prod_fill": "prod"}


def _heads(q_heads: int, kv_heads: int) -> Heads:
    family = "mha" if kv_heads == q_heads else "mqa" if kv_heads == 1 else "gqa"
    return Heads(family, q_heads, kv_heads)


def case_runs(shapes: Iterable[Shape]) -> list[tuple[str, str]]:
    """(case id, execution) of every shape that this kit has, each once, in their order."""
    found = ((case.id, execution) for shape in shapes if (case := shape.case) for execution in shape.executions)
    return list(dict.fromkeys(found))


_VERIFIES = (("eagle", 1), ("eagle", 2), ("frozen_kv_mtp", 1), ("dflash", 1), ("ngram", 1))
"""(whose verify input, K)."""


def _verifies(swa: str, prefixes: tuple[int, ...], window: int) -> list[Shape]:
    shapes = []
    for whose, topk in _VERIFIES:
        tail = f"{whose}_verify_{swa}{'chain' if topk == 1 else 'tree'}"
        options = (("topk", topk), ("spec_kind", whose))
        for kind, head in (("verify", "runner_"), ("verify-graph", "runner_cuda_graph_")):
            # Its test of windows has graphs of a chain above the window instead of this one.
            if (window, kind, whose, topk) == (4, "verify-graph", "eagle", 1):
                continue
            own = (5, 6) if (kind, tail) == ("verify", "eagle_verify_tree") else prefixes
            shapes.append(
                Shape(head + tail, kind, "target-verify", own, (3, 3), topk=topk, window=window, options=options)
            )
    return shapes


def _layouts(name: str, mode: str, prefixes: tuple[int, ...], new: tuple[int, ...], *heads: int) -> list[Shape]:
    # A decode has no new tokens to scatter.
    layouts = ("interleaved_pages", "non_monotonic_extend")[: 2 if new else 1]
    q_heads, kv_heads, window = heads
    return [
        Shape(name, "dense", mode, prefixes, new, q_heads=q_heads, kv_heads=kv_heads, window=window, layout=layout,
              options=(("loc_layout", layout),))
        for layout in layouts
    ]  # fmt: skip


def _draft_extends() -> list[Shape]:
    name = "runner_cuda_graph_eagle_draft_extend_v2_fixed_tokens"
    graphs = [
        Shape(name, "v2-graph", "draft-extend-v2", (4, 7), (3, 3), bucket=bucket, padding=padding,
              options=(("cuda_graph_capture_batch_size", bucket), ("pad_style", padding)))
        for padding in _PADDINGS
        for bucket in (2, 4, 8)
    ]  # fmt: skip
    runner = "runner_eagle_draft_extend_v2_cuda_graph_runner_fixed_tokens"
    return [*graphs, Shape(runner, "v2-runner", "draft-extend-v2", (4, 7), (3, 3), padding="prod_fill")]


def _split_ops(name: str, prefixes: tuple[int, ...], new: tuple[int, ...], tokens: int, **more: int) -> list[Shape]:
    return [
        Shape(name, "split-op", "extend", prefixes, new, **more,  # type: ignore[arg-type]
              options=(("breakable", breakable), ("static_num_tokens", tokens)))
        for breakable in (False, True)
    ]  # fmt: skip


_EDGE = (14, 15, 16)
_DECODE_GRAPHS = (
    Shape("runner_cuda_graph_decode_page_boundary", "decode-graph", "decode", _EDGE),
    Shape("runner_cuda_graph_gqa_decode_page_boundary", "decode-graph", "decode", _EDGE, kv_heads=2),
    Shape("runner_cuda_graph_mqa_decode_bsz1", "decode-graph", "decode", (7,), kv_heads=1),
    Shape("runner_cuda_graph_swa_decode_within_window", "decode-graph", "decode", (1, 2, 3), window=4),
    Shape("runner_cuda_graph_swa_decode_above_window", "decode-graph", "decode", (7, 8, 9), window=4),
)
_DRAFTS = (
    Shape("runner_eagle_draft_decode_cuda_graph_chain", "draft-runner", "decode", (4, 7),
          options=(("topk", 1), ("speculative_num_draft_tokens", 3))),
    Shape("runner_eagle_draft_decode_cuda_graph_tree", "draft-runner", "decode", (4, 7), page_size=1,
          options=(("topk", 2), ("speculative_num_draft_tokens", 4))),
    Shape("runner_frozen_kv_mtp_decode_cuda_graph", "mtp-runner", "decode", (4, 7)),
)  # fmt: skip
_LAYOUT_CASES = (
    *_layouts("layout_extend_two_request_ragged", "extend", (8, 16), (8, 16), 12, 12, -1),
    *_layouts("layout_decode_page_boundary", "decode", (15, 16, 17), (), 12, 12, -1),
)
_EAGER = (
    Shape("runner_eager_decode_page_boundary", "dense", "decode", _EDGE),
    Shape("runner_eager_extend_ragged_page_boundary", "dense", "extend", (0, 8, 16), (15, 8, 1)),
    Shape("runner_eager_gqa_decode_page_boundary", "dense", "decode", _EDGE, kv_heads=2),
    Shape("runner_eager_mqa_decode_bsz1", "dense", "decode", (7,), kv_heads=1),
)


def shapes_of(backend: str) -> tuple[Shape, ...]:
    """Shapes in SGLang's test files of a backend: ``test/registered/attention/unittest``, dense and swa. The cases of
    ``OWN_LISTS`` come before them.
    """
    if backend == "torch_native":
        return (*_EAGER, *_LAYOUT_CASES)
    swa_above = Shape(
        "runner_cuda_graph_eagle_verify_swa_above_window", "verify-graph", "target-verify", (6, 8), (3, 3), window=4,
        options=(("topk", 1), ("spec_kind", "eagle")),
    )  # fmt: skip
    return (
        *_DECODE_GRAPHS,
        *_split_ops("runner_split_op_mha_extend_ragged_page_boundary", (0, 8, 16), (15, 8, 1), 32),
        *_split_ops("runner_split_op_gqa_extend_cross_page_boundary", (15,), (2,), 4, kv_heads=2),
        *_split_ops("runner_split_op_swa_extend_no_prefix_window_edges", (0, 0, 0), (3, 4, 5), 16, window=4),
        *_split_ops("runner_split_op_swa_extend_prefix_within_window", (1, 2, 3), (1, 1, 1), 4, window=4),
        *_verifies("", (4, 7), -1),
        *_verifies("swa_", (3, 5), 4),
        swa_above,
        *_draft_extends(),
        *_DRAFTS,
        *_LAYOUT_CASES,
        *_layouts("layout_swa_extend_within_window", "extend", (8, 16), (8, 16), 8, 4, 12),
        *_layouts("layout_swa_decode_page_boundary", "decode", (15, 16, 17), (), 8, 4, 12),
    )
