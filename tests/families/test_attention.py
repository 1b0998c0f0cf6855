"""The oracle against loops that a reader can check by eye."""

import math

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax import attention
from attn_testkit.families.softmax.attention import attend
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule

CASES = [
    "decode-gqa3x2-d32-bf16-p16-k0.5.20-shuffled-gauss-w4-b3prod",
    "target-verify-gqa2x2-d32-fp16-p1-k5.9-t0.0.1.1.3-shuffled-gauss-w3-cap1.5-sink-b2prod",
    "draft-extend-mqa4-d32-bf16-p16-k5.9-n4a1.3-reversed-peaked-sink-b2prod",
    "draft-extend-v2-mha2-d32-bf16-p16-k0.9-n4a1.3-shuffled-shifted-kvfp8e4m3-cap1.5-b2prod",
    "decode-mla2-d32r32-bf16-p16-k5.9-shuffled-gauss-b2prod",
    "extend-gqa2x2-d32-bf16-p4-k5.8-n6a2.6-shuffled-gauss-local4-b2prod",
]


def by_hand(case_id: str) -> torch.Tensor:
    """[L, T, Hq, Dv], one row, one head, one key at a time."""
    case = parse_case(case_id)
    schedule = make_schedule(case)
    step = schedule.steps[0]
    data = make_step_data(schedule, step)
    out = torch.zeros(2, step.tokens, case.heads.q_heads, case.head_dim, dtype=torch.float64)
    for index, layer in enumerate(make_layers(case)):
        row = 0
        for b, request in enumerate(step.requests):
            for j in range(request.new):
                depth = request.tree.depths[j] if request.tree else j
                for head in range(case.heads.q_heads):
                    kv_head = head // layer.q_per_kv
                    logits, values = [], []
                    for key in range(request.prefix + request.new):
                        node = key - request.prefix
                        position = key if node < 0 or not request.tree else request.prefix + request.tree.depths[node]
                        seen = node < 0 or (bool(request.tree.visible[j, node]) if request.tree else node <= j)
                        if layer.sliding_window_size >= 0:
                            seen = seen and position >= request.prefix + depth - layer.sliding_window_size
                        if layer.attention_chunk_size:
                            size = layer.attention_chunk_size
                            seen = seen and position // size == (request.prefix + depth) // size
                        if not seen:
                            continue
                        logit = float(data.q[index, row, head].double() @ data.keys[index, b, key, kv_head])
                        logit *= layer.scaling
                        if layer.logit_cap:
                            logit = layer.logit_cap * math.tanh(logit / layer.logit_cap)
                        logits.append(logit)
                        values.append(data.values[index, b, key, kv_head])
                    weights = [math.exp(x) for x in logits]
                    total = sum(weights) + (math.exp(float(layer.sinks[head])) if layer.sinks is not None else 0.0)
                    for weight, value in zip(weights, values, strict=True):
                        out[index, row, head] += weight / total * value
                row += 1
    return out


@pytest.mark.parametrize("case_id", CASES)
def test_the_oracle_is_attention_as_one_would_write_it_down(case_id: str) -> None:
    schedule = make_schedule(parse_case(case_id))
    got = expect(schedule, schedule.steps[0]).attention
    want = by_hand(case_id)
    assert (got - want).abs().max() < 1e-9 * want.abs().max()


def test_mean_data_gives_exact_means() -> None:
    schedule = make_schedule(parse_case("decode-mha2-d32-fp16-p16-k6-shuffled-mean-b1prod"))
    data = make_step_data(schedule, schedule.steps[0])
    out = attend(data, make_layers(schedule.case)).out
    assert torch.allclose(out[:, 0], data.values[:, 0].mean(1), rtol=0, atol=1e-12)


def test_very_negative_logits_do_not_vanish() -> None:
    schedule = make_schedule(parse_case("decode-mha2-d64-fp16-p16-k6-shuffled-negative-b1prod"))
    data = make_step_data(schedule, schedule.steps[0])
    logits = (data.q[0, 0, 0].double() @ data.keys[0, 0, :, 0].T) * make_layers(schedule.case)[0].scaling
    assert logits.max() < -3e4
    assert attend(data, make_layers(schedule.case)).out.abs().max() > 0.1


@pytest.mark.parametrize(
    "case_id",
    [
        "target-verify-gqa4x2-d64-bf16-p16-k40.1.17-t0.0.1.1.3-shared-gauss-w20-cap1.5-sink-b3prod",
        "draft-extend-gqa4x2-d64-fp16-p16-k29.125.61.13-n6a6.1.3.2-interleaved-gauss-sink-b4prod",
        "decode-mla4-d64r16-bf16-p16-k15.160.17-shuffled-gauss-b4prod",
    ],
)
@pytest.mark.parametrize("layers_at_once", [0, 1 << 40])
def test_a_large_step_computed_in_parts_gives_what_it_gives_at_once(
    case_id: str, layers_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LAYERS_AT_ONCE", layers_at_once)
    schedule = make_schedule(parse_case(case_id))
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(schedule.case)
    without_first = data.visible.clone()
    without_first[..., 0] = False
    for visible in (None, without_first):
        monkeypatch.setattr(attention, "_AT_ONCE", 1 << 40)
        whole = attend(data, layers, visible, flat=True)
        monkeypatch.setattr(attention, "_AT_ONCE", 0)
        parts = attend(data, layers, visible, flat=True)
        assert torch.equal(parts.keys, whole.keys)
        for name in ("out", "mass", "flat"):
            assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-14), name
        # Keys behind a request's last one, which nobody sees, no longer count.
        assert (parts.logit_noise <= whole.logit_noise * (1 + 1e-12)).all()


@pytest.mark.parametrize(
    ("case_id", "calls"),
    [
        ("decode-gqa4x2-d64-bf16-p16-k40.17.40.3.40.17-shuffled-gauss-w20-sink-b6prod", 4),
        ("extend-gqa2x2-d32-fp16-p16-k20.1.20x2-n6a6.2.6.3-shuffled-gauss-cap1.5-b4prod", 3),
        ("decode-gqa4x2-d64-bf16-p16-k40.17.40.3.40.17-shuffled-gauss-kvfp8e4m3-b6prod", 4),
    ],
)
def test_requests_of_one_length_have_the_bits_that_each_has_by_itself(
    case_id: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule(parse_case(case_id))
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(schedule.case)
    made, computed = [], attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *given: made.append(computed(*given)) or made[-1])
    monkeypatch.setattr(attention, "_AT_ONCE", 0)
    alone = attend(data, layers, flat=True, factors=2.0**-10)
    assert len(made) == len(data.visible)
    made.clear()
    # Room for two of the longest requests.
    longest = data.visible.shape[-1] * (
        data.stored_keys[:, 0, 0].numel() + data.q[:, 0, :, 0].numel() * data.visible.shape[1]
    )
    monkeypatch.setattr(attention, "_AT_ONCE", 2 * longest)
    together = attend(data, layers, flat=True, factors=2.0**-10)
    assert len(made) == calls
    for name in ("out", "mass", "flat", "logit_noise", "keys", "lse", "top"):
        assert torch.equal(getattr(together, name), getattr(alone, name)), name
    for name in ("values", "logits", "bend", "lse", "lse_bend"):
        assert torch.equal(getattr(together.factors, name), getattr(alone.factors, name)), name
