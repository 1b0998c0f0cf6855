"""Bidirectional spans: what each row sees, computed by hand, and what a hint says of other rules."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

CASES = [
    "extend-gqa2x2-d32-fp32-p4-k19.6.8.0.30-n14a14.4.9.1.12-shuffled-gauss-spans-b5prod",
    "extend-gqa2x2-d32-fp32-p4-k19.6.8.0.30-n14a14.4.9.1.12-shuffled-gauss-w3-spansprefixwidebylayer-cap1.5-sink-b5prod",
    "extend-gqa2x2-d32-fp32-p4-k19.6.8.0.30-n14a14.4.9.1.12-shuffled-gauss-w7one-spansprefix-b5prod",
    "decode-gqa2x2-d32-fp32-p4-k19.6.8.0.30-shuffled-gauss-w3-spans-b5prod",
]


@pytest.mark.parametrize("case_id", CASES)
def test_a_row_sees_earlier_keys_and_its_span_but_none_before_its_window(case_id: str) -> None:
    case = parse_case(case_id)
    schedule = make_schedule(case)
    step = schedule.steps[0]
    found = expect(schedule, step)
    data, later = found.data, 0
    for place, layer in enumerate(make_layers(case)):
        for row, request in enumerate(data.row_request.tolist()):
            own, at = step.requests[request], int(data.positions[row])
            spans = own.spans if layer.bidirectional_spans else ()
            window = layer.sliding_window_size
            seen = [
                key
                for key in range(own.prefix + own.new)
                if (key <= at or any(first <= at <= last and first <= key <= last for first, last in spans))
                and (window < 0 or key >= at - window)
            ]
            later += seen[-1] > at
            for head in range(layer.tp_q_head_num):
                kv_head = head // layer.q_per_kv
                logits = data.keys[place][request, seen, kv_head] @ data.q[place, row, head].double() * layer.scaling
                if layer.logit_cap:
                    logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
                if layer.sinks is not None:
                    logits = torch.cat([logits, layer.sinks[head : head + 1].double()])
                want = torch.softmax(logits, 0)[: len(seen)] @ data.values[place][request, seen, kv_head]
                assert torch.allclose(found.attention[place, row, head], want, rtol=1e-10, atol=1e-12)
    assert (later > 0) == case_id.startswith("extend")
