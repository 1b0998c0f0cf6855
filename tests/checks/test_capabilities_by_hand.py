"""What is not declared: each way of asking for it, and what a constructor may answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import DECODE, schedule_of

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks import capabilities as module
from attn_testkit.checks.capabilities import refuses_undeclared, undeclared_contexts
from attn_testkit.contract import (
    KV_LAYOUTS,
    AttentionBackend,
    BackendContext,
    Capabilities,
    ForwardMode,
    KVLayer,
    KVPool,
    KVPools,
    KVPoolSpec,
    Precision,
    Unsupported,
    refuse_undeclared,
)
from attn_testkit.steps.data import make_layers

CAPABILITIES = TorchNativeBackend.capabilities
CPU = torch.device("cpu")


def context(case: str = DECODE, **fields: Any) -> BackendContext:
    layers = make_layers(parse_case(case))
    values = {
        "device": CPU, "dtype": torch.float32, "layers": layers, "page_size": 4,
        "kv_pool": KVPool(64, 4, layers, torch.float32, CPU), "req_to_token": torch.zeros(4, 32, dtype=torch.int32),
        "max_context_len": 32, "max_bs": 4, "max_num_tokens": 16, "num_draft_tokens": 4, "topk": 1,
        "modes": frozenset({ForwardMode.DECODE}),
    }  # fmt: skip
    known = BackendContext.__dataclass_fields__
    return BackendContext(**{name: value for name, value in {**values, **fields}.items() if name in known})


def outside(declared: Capabilities = CAPABILITIES, **fields: Any) -> dict[str, BackendContext]:
    return dict(undeclared_contexts(declared, context(**fields)))


@pytest.mark.parametrize(
    ("pages", "page"), [({1, 16}, 48), ({48}, 3), ({48, 3}, 5), ({48, 3, 5}, 256), ({48, 3, 5, 256}, None)]
)
def test_a_page_size_that_is_not_declared(pages: set[int], page: int | None) -> None:
    found = [
        name
        for name in outside(CAPABILITIES.with_changes(kv_pool={"page_sizes": pages}))
        if name.startswith("page size")
    ]
    assert found == ([] if page is None else [f"page size {page}"])
    if page is not None:
        asked = outside(CAPABILITIES.with_changes(kv_pool={"page_sizes": pages}))[found[0]]
        assert asked.page_size == page
        assert asked.kv_pool.page_size == page
        assert asked.layers == context().layers


@pytest.mark.parametrize(
    ("dtypes", "name", "dtype"),
    [
        ({"fp16", "bf16"}, "fp32", torch.float32),
        ({"fp32"}, "bf16", torch.bfloat16),
        ({"fp32", "bf16"}, "fp16", torch.float16),
    ],
)
def test_a_dtype_that_is_not_declared(dtypes: set[str], name: str, dtype: torch.dtype) -> None:
    asked = outside(CAPABILITIES.with_changes(precision={"dtypes": dtypes}))[f"dtype {name}"]
    assert asked.dtype == dtype == asked.kv_pool.dtype
    pool = KVPool(64, 4, context().layers, torch.float8_e4m3fn, CPU)
    assert f"dtype {name}" not in outside(CAPABILITIES.with_changes(precision={"dtypes": dtypes}), kv_pool=pool)
    assert not any(key.startswith("dtype") for key in outside(CAPABILITIES))


@pytest.mark.parametrize(
    ("layouts", "name"),
    [({"nhd"}, "hnd"), ({"nhd", "hnd"}, "kv-in-block"), ({"custom"}, "nhd"), (set(KV_LAYOUTS) - {"custom"}, None)],
)
def test_a_kv_layout_that_is_not_declared(layouts: set[str], name: str | None) -> None:
    found = outside(CAPABILITIES.with_changes(kv_pool={"kv_layouts": layouts}))
    assert [key for key in found if key.startswith("KV layout")] == ([f"KV layout {name}"] if name else [])
    if name:
        assert found[f"KV layout {name}"].kv_pool.layout == name
        with pytest.raises(Unsupported, match=f"KV layout {name} is not declared"):
            refuse_undeclared(CAPABILITIES.with_changes(kv_pool={"kv_layouts": layouts}), found[f"KV layout {name}"])


def own_pages(spec: KVPoolSpec) -> list[KVLayer]:
    """In pages of up to 16 slots alone."""
    if spec.page_size > 16:
        raise ValueError("no page is so large")
    pools = [KVPool(spec.num_slots - spec.page_size, spec.page_size, spec.layers, spec.dtype, spec.device)]
    return list(pools[0].memory.values())


@pytest.mark.parametrize(("pages", "asked"), [({48}, ["page size 3"]), ({4}, [])])
def test_what_differs_in_one_thing_has_a_pool_laid_out_as_before_or_is_not_asked(
    pages: set[int], asked: list[str]
) -> None:
    pool = KVPool(64, 4, context().layers, torch.float32, CPU, "custom", own_pages)
    found = outside(CAPABILITIES.with_changes(kv_pool={"page_sizes": pages, "kv_layouts": {"custom"}}), kv_pool=pool)
    assert [name for name in found if name.startswith("page size")] == asked
    assert all(found[name].kv_pool.layout == "custom" for name in asked)


@pytest.mark.parametrize(("dims", "dim"), [({64}, 48), ({48}, 80), ({48, 80}, 24), ({48, 80, 24}, None)])
def test_a_head_dim_that_is_not_declared(dims: set[int], dim: int | None) -> None:
    found = outside(CAPABILITIES.with_changes(heads={"head_dims": dims}))
    if dim is None:
        assert not any(key.startswith("head dim") for key in found)
        return
    asked = found[f"head dim {dim}"]
    assert {(layer.head_dim, layer.v_head_dim) for layer in asked.layers} == {(dim, dim)}
    mla = outside(
        CAPABILITIES.with_changes(heads={"head_dims": dims}),
        case="decode-mla2-d32r16-bf16-p16-k5.9-shuffled-gauss-b2prod",
    )
    assert not any(key.startswith("head dim") for key in mla)


def test_a_window_a_cap_and_sinks_that_are_not_declared() -> None:
    assert not {"a sliding window", "a soft cap", "attention sinks"} & set(outside())
    for changes, name in (
        ({"windows": {"target-verify"}}, "a sliding window"),
        ({"options": {"logit_cap": False}}, "a soft cap"),
        ({"options": {"sinks": False}}, "attention sinks"),
    ):
        found = outside(CAPABILITIES.with_changes(**changes))
        assert [key for key in found if key.startswith(("a ", "attention"))] == [name]
        for layer in found[name].layers:
            assert layer.sliding_window_size == (4 if name == "a sliding window" else -1)
            assert layer.logit_cap == (2.0 if name == "a soft cap" else 0.0)
            assert (layer.sinks is not None) is (name == "attention sinks")
            assert layer.sinks is None or layer.sinks.shape == (layer.tp_q_head_num,)


VERIFY = frozenset({ForwardMode.TARGET_VERIFY})


@pytest.mark.parametrize(("smallest", "asked"), [(0, None), (1, 0), (5, 4)])
def test_a_window_below_the_smallest_that_is_declared(smallest: int, asked: int | None) -> None:
    declared = CAPABILITIES.with_changes(windows={"smallest": smallest})
    found = {name: each for name, each in outside(declared).items() if "window" in name}
    assert list(found) == ([] if asked is None else [f"a sliding window of size {asked}"])
    for name, each in found.items():
        assert {layer.sliding_window_size for layer in each.layers} == {asked}
        with pytest.raises(Unsupported, match=f"sliding window of size {asked} is not declared"):
            refuse_undeclared(declared, each)
        refuse_undeclared(declared.with_changes(windows={"smallest": smallest - 1}), each)
        assert name not in outside(declared.with_changes(windows=("target-verify",)))


@pytest.mark.parametrize(
    ("supported", "asked", "windows"),
    [
        ("any", None, ()),
        ("one", "layers with sliding windows 4 and 5", (4, 5)),
        ("same", "layers with sliding windows 4 and -1", (4, -1)),
    ],
)
def test_windows_of_layers_that_differ_more_than_is_declared(
    supported: str, asked: str | None, windows: tuple[int, ...]
) -> None:
    declared = CAPABILITIES.with_changes(windows={"layers": supported})
    found = {name: each for name, each in outside(declared).items() if "window" in name}
    assert list(found) == ([asked] if asked else [])
    for each in found.values():
        assert tuple(layer.sliding_window_size for layer in each.layers) == windows
        with pytest.raises(Unsupported, match="layers with sliding windows"):
            refuse_undeclared(declared, each)
        refuse_undeclared(CAPABILITIES, each)
        refuse_undeclared(declared, context())
        alike = tuple(replace(layer, sliding_window_size=9) for layer in each.layers)
        refuse_undeclared(declared, replace(each, layers=alike))
    assert not [name for name in outside(declared, layers=context().layers[:1]) if "window" in name]


@pytest.mark.parametrize(
    ("supported", "mode", "layers", "is_asked"),
    [
        ((), ForwardMode.EXTEND, 2, True),
        ((), ForwardMode.EXTEND, 3, True),
        ((), ForwardMode.TARGET_VERIFY, 3, True),
        ((), ForwardMode.DECODE, 3, False),
        ((ForwardMode.TARGET_VERIFY,), ForwardMode.EXTEND, 2, True),
        ((ForwardMode.TARGET_VERIFY,), ForwardMode.TARGET_VERIFY, 3, False),
    ],
)
def test_layers_that_are_not_causal_where_they_are_not_declared(
    supported: tuple[ForwardMode, ...], mode: ForwardMode, layers: int, is_asked: bool
) -> None:
    declared, one = CAPABILITIES.with_changes(options={"non_causal": supported}), context().layers[0]
    given = {"modes": frozenset({mode}), "layers": tuple(replace(one, layer_id=i) for i in range(layers))}
    found = {name: each for name, each in outside(declared, **given).items() if "causal" in name}
    assert list(found) == (["a layer that is not causal"] if is_asked else [])
    for each in found.values():
        assert not each.causal
        with pytest.raises(Unsupported, match=f"layers that are not causal in {mode} is not declared"):
            refuse_undeclared(declared, each)
        refuse_undeclared(declared.with_changes(options={"non_causal": {mode}}), each)
        windowed = replace(each, layers=tuple(replace(layer, sliding_window_size=4) for layer in each.layers))
        without = declared.with_changes(options={"non_causal": {mode}}, windows={"non_causal": ()})
        with pytest.raises(Unsupported, match="window of layers that are not causal, left"):
            refuse_undeclared(without, windowed)


def test_a_context_that_exceeds_several_capabilities_is_refused_for_each_by_its_record() -> None:
    one = context().layers[0]
    layers = (replace(one, sliding_window_size=4), replace(one, bidirectional_spans=True, is_cross_attention=True))
    heads = {
        "heads": {"families": {one.head_layout.name}, "head_dims": {one.head_dim}},
        "options": {"logit_cap": True, "sinks": True},
        "bounds": {"max_topk": 1},
    }
    declared = Capabilities(
        eager={"decode"}, precision=Precision(dtypes={"fp32"}), kv_pool=KVPools(page_sizes={4}), **heads
    )
    assert list(declared.refused(context(layers=layers, draft_widths=(2, 4)))) == [
        ("sliding window", "decode"),
        ("bidirectional spans in", "decode"),
        ("layers with and layers without bidirectional spans,", 2),
        ("cross-attention layers in", "decode"),
        ("batches of several widths in", "decode"),
    ]
    assert not list(declared.refused(context(layers=(one,))))


def test_a_scaling_that_is_not_the_usual_one() -> None:
    declared, usual = (
        CAPABILITIES.with_changes(options={"any_scaling": False}),
        f"{DECODE}-s0".replace("-b", "-usualscale-b")[:-3],
    )
    found = {name: each for name, each in outside(declared, case=usual).items() if "scaling" in name}
    (asked,) = found.values()
    assert list(found) == ["a scaling other than 1/sqrt(head_dim)"]
    assert not any(layer.has_usual_scaling for layer in asked.layers)
    with pytest.raises(Unsupported, match=r"scaling 0[.]"):
        refuse_undeclared(declared, asked)
    refuse_undeclared(declared, context(usual))
    refuse_undeclared(CAPABILITIES, asked)
    one = (context(usual).layers[0], context().layers[0])
    with pytest.raises(Unsupported, match="scaling"):
        refuse_undeclared(declared, context(layers=one))
    mla = context("decode-mla2-d32r32-bf16-p16-k5.9-shuffled-gauss-b2prod")
    refuse_undeclared(declared, mla)
    assert not [name for name, _ in undeclared_contexts(declared, mla) if "scaling" in name]
    assert not [name for name in outside() if "scaling" in name]


def test_a_model_has_one_window_where_its_windowed_layers_agree() -> None:
    def of(*windows: int) -> BackendContext:
        return context(layers=tuple(replace(context().layers[0], sliding_window_size=window) for window in windows))

    assert [of(-1, -1).sliding_window_size, of(-1, 7).sliding_window_size, of(0, 0).sliding_window_size] == [-1, 7, 0]
    with pytest.raises(ValueError, match="layers have windows of 4 and 11, so the context has no single window"):
        _ = of(11, -1, 4).sliding_window_size


@pytest.mark.parametrize(("topk", "in_trees", "is_asked"), [(1, False, True), (2, False, False), (2, True, True)])
def test_a_small_window_is_asked_of_trees_where_windows_are_declared_of_them(
    topk: int, in_trees: bool, is_asked: bool
) -> None:
    declared = CAPABILITIES.with_changes(windows={"smallest": 1, "in_trees": in_trees})
    assert ("a sliding window of size 0" in outside(declared, modes=VERIFY, topk=topk)) is is_asked


@pytest.mark.parametrize(
    ("mode", "most", "rows"),
    [
        (ForwardMode.DECODE, 8, None),
        (ForwardMode.DRAFT_EXTEND, 8, None),
        (ForwardMode.DRAFT_EXTEND_V2, 8, 9),
        (ForwardMode.TARGET_VERIFY, 8, 9),
        (ForwardMode.TARGET_VERIFY, 1023, 1024),
        (ForwardMode.TARGET_VERIFY, 1024, None),
    ],
)
def test_one_row_more_than_is_declared(mode: ForwardMode, most: int, rows: int | None) -> None:
    found = outside(CAPABILITIES.with_changes(bounds={"max_q_rows": most}), modes=frozenset({mode}))
    names = [key for key in found if key.endswith("query rows per request")]
    assert names == ([] if rows is None else [f"{rows} query rows per request"])
    if rows is not None:
        asked = found[names[0]]
        assert (asked.num_draft_tokens, asked.max_num_tokens) == (rows, rows * asked.max_bs)


@pytest.mark.parametrize(
    ("mode", "most", "tokens"),
    [
        (ForwardMode.DECODE, 8, None),
        (ForwardMode.DRAFT_EXTEND, 8, None),
        (ForwardMode.EXTEND, 8, 9),
        (ForwardMode.EXTEND, 1023, 1024),
        (ForwardMode.EXTEND, 1024, None),
    ],
)
def test_one_new_token_more_than_is_declared(mode: ForwardMode, most: int, tokens: int | None) -> None:
    found = outside(CAPABILITIES.with_changes(bounds={"max_extend_tokens": most}), modes=frozenset({mode}))
    names = [key for key in found if key.endswith("new tokens per request")]
    assert names == ([] if tokens is None else [f"{tokens} new tokens per request"])
    if tokens is not None:
        asked = found[names[0]]
        assert (asked.max_extend_tokens, asked.max_num_tokens) == (tokens, max(tokens, context().max_num_tokens))


@pytest.mark.parametrize(("most", "topk"), [(1, 2), (4, 5), (1023, 1024), (1024, None)])
def test_one_child_more_than_is_declared(most: int, topk: int | None) -> None:
    found = outside(CAPABILITIES.with_changes(bounds={"max_topk": most}), modes=VERIFY)
    assert [key for key in found if key.startswith("topk")] == ([] if topk is None else [f"topk {topk}"])
    assert topk is None or found[f"topk {topk}"].topk == topk
    assert not any(key.startswith("topk") for key in outside(CAPABILITIES.with_changes(bounds={"max_topk": most})))


def test_a_mode_that_is_declared_neither_eagerly_nor_in_graphs() -> None:
    some = CAPABILITIES.with_changes(eager={"decode"}, graph={"target-verify"})
    found = outside(some)
    (name,) = (key for key in found if key.startswith("mode"))
    assert name == "mode draft-decode"
    assert found[name].modes == {ForwardMode.DRAFT_DECODE}
    assert not any(key.startswith("mode") for key in outside())


OTHER_HEADS = "a layer whose heads differ from the first layer's"


@pytest.mark.parametrize(
    ("heads", "declared", "shape"),
    [
        ("gqa2x2-d32", {}, (4, 2, 64)),
        ("gqa2x2-d32", {"heads": {"head_dims": {32}}}, (8, 4, 32)),
        ("mha1-d32", {"heads": {"head_dims": {32}}}, (2, 2, 32)),
        ("mqa4-d32", {"heads": {"head_dims": {32}}}, None),
        ("mqa4-d32", {"heads": {"head_dims": {16, 32}}}, (4, 1, 16)),
        ("mla4-d32r16", {}, None),
    ],
)
def test_a_layer_of_other_heads_than_the_first(
    heads: str, declared: dict[str, Any], shape: tuple[int, int, int] | None
) -> None:
    case = f"decode-{heads}-fp32-p4-k5.9-shuffled-gauss-layers3from5-b3prod"
    layers = make_layers(parse_case(case))
    fields = {"layers": layers, "kv_pool": KVPool(64, 4, layers, torch.float32, CPU)}
    undeclared = CAPABILITIES.with_changes(heads={"heads_by_layer": False}).with_changes(**declared)
    asked = outside(undeclared, **fields).get(OTHER_HEADS)
    assert OTHER_HEADS not in outside(CAPABILITIES.with_changes(**declared), **fields), "declared"
    assert OTHER_HEADS not in outside(undeclared, layers=layers[:1]), "of one layer"
    assert (asked is None) is (shape is None)
    if asked is not None:
        first = layers[0].head_shape
        assert [layer.head_shape for layer in asked.layers] == [first, first, shape]
        assert asked.kv_pool.get_key_buffer(7).shape[1:] == asked.layers[2].head_shape[1:]
        with pytest.raises(Unsupported, match="number of head shapes 2 is not declared"):
            refuse_undeclared(undeclared.with_changes(heads={"families": {"mha", "gqa", "mqa"}}), asked)
        refuse_undeclared(CAPABILITIES.with_changes(**declared), asked)


def test_sinks_that_are_not_declared_are_one_for_each_head_of_each_layer() -> None:
    case = "decode-gqa2x4-d64-fp32-p4-k5.9-shuffled-gauss-layers3from5by4x2d32.8x4d64-b3prod"
    layers = make_layers(parse_case(case))
    fields = {"layers": layers, "kv_pool": KVPool(64, 4, layers, torch.float32, CPU)}
    asked = outside(CAPABILITIES.with_changes(options={"sinks": False}), **fields)["attention sinks"]
    assert [len(layer.sinks) for layer in asked.layers if layer.sinks is not None] == [4, 8, 4]


def test_every_way_is_asked_in_some_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Takes(TorchNativeBackend):
        capabilities = CAPABILITIES.with_changes(options={"sinks": False, "logit_cap": False})

        def __init__(self, context: BackendContext) -> None:
            made.append(context)

    schedule, every = schedule_of(DECODE), list(undeclared_contexts(Takes.capabilities, context()))
    assert len(every) >= 4
    for number, (name, _) in enumerate(every):
        monkeypatch.setattr(type(parse_case(DECODE)), "derived", lambda self, what, n, number=number: number)
        (finding,) = refuses_undeclared(Takes, schedule, context())
        assert finding.check == "refuses-undeclared"
        assert finding.headline == f"{name} is not declared, yet the constructor accepted it"
        assert "super().__init__(context)" in finding.hint
    assert len(made) == len(every)


def test_unsupported_is_right_and_anything_else_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(TorchNativeBackend):
        error: Exception = Unsupported("no")

        def __init__(self, context: BackendContext) -> None:
            raise self.error

    assert refuses_undeclared(Raises, schedule_of(DECODE), context()) == []
    Raises.error = KeyError("x")
    (finding,) = refuses_undeclared(Raises, schedule_of(DECODE), context())
    assert finding.headline.endswith("and the constructor raised KeyError instead of Unsupported: 'x'")
    assert finding.where.endswith("in __init__: raise self.error")
    monkeypatch.setattr(module, "FEATURES", ())
    assert refuses_undeclared(Raises, schedule_of(DECODE), context()) == []


def test_the_kits_own_constructor_refuses_all_of_it() -> None:
    class Plain(AttentionBackend):
        capabilities = CAPABILITIES.with_changes(
            eager={"decode", "target-verify"},
            graph=(),
            options={"sinks": False, "logit_cap": False},
            windows=(),
            bounds={"max_topk": 2, "max_q_rows": 8},
            precision={"dtypes": {"fp32"}},
        )

        forward = init_forward_metadata = None  # type: ignore[assignment]

    found = dict(undeclared_contexts(Plain.capabilities, context(modes=VERIFY)))
    # One of each feature that this class does not declare.
    assert list(found) == [
        "mode draft-decode", "head dim 48", "keys wider than values by 16", "dtype bf16",
        "page size 48", "9 query rows per request", "topk 3",
        "a sliding window", "cross-attention layers", "bidirectional spans", "a soft cap", "attention sinks",
        "selected keys", "an indexer",
    ]  # fmt: skip
    for name, asked in found.items():
        with pytest.raises(Unsupported):
            Plain(asked)
        assert replace(asked) == asked, name
