"""What lies behind the live rows of a replay, as each kind of padding has it."""

from __future__ import annotations

from typing import Any

import pytest

from attn_testkit import check_backend
from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.results import Status

CASE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b5{}"


class WantsZeros(TorchNativeBackend):
    """Raises where positions or request rows of padding are not 0. Padded lengths are at the fill value, 1."""

    # So that a plan may look at the device.
    capabilities = TorchNativeBackend.capabilities.with_changes(needs_cpu_seq_lens=True)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture=in_capture)
        if in_capture:
            return
        live = batch.batch_size - batch.num_padding
        for name in ("positions", "req_pool_indices"):
            padded = getattr(batch, name)[live : batch.batch_size]
            if int(padded.abs().sum()):
                raise RuntimeError(f"padding of {name} is {padded.tolist()}")
        if batch.num_padding and set(batch.seq_lens[live : batch.batch_size].tolist()) != {1}:
            raise RuntimeError("padding of seq_lens is not the fill value")


@pytest.mark.parametrize(("padding", "zeros"), [("prod", True), ("nan", True), ("small", True), ("stale", False)])
def test_padding_is_zeros_unless_it_is_what_an_earlier_replay_left(padding: str, zeros: bool) -> None:
    spec = f"{__name__}:WantsZeros"
    (result,) = check_backend(spec, device="cpu", executions=["graph"], cases=[CASE.format(padding)])
    assert result.status is (Status.PASSED if zeros else Status.FAILED), str(result)
    if not zeros:
        assert "padding of " in str(result)
