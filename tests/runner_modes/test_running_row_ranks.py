"""Prompts whose rows are dealt, in one process: what each rank gets, and the failure of a rank that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.row_ranks import RowRanks
from in_process import check_backend
from typing_extensions import override

from attn_testkit.backends.torch_native_pcp import TorchNativePcpBackend
from attn_testkit.backends.torch_native_state_pcp import TorchNativeStatePcpBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import AttentionBackend, AttentionLayer, ForwardBatch, StateLayer, Unsupported
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import controls_of_row_ranks, q_row_ranks, r_state_ranks
from cuda_on_cpu import emulated_cuda

ZIGZAG = "extend-gqa3x2-d64-bf16-p4-k5.0-n12a9.3-shuffled-gauss-pcp3zigzag-b2prod"
STATES = "extend-gdn2x2-d32-bf16-p16-k40.0-n9a7.2-shuffled-mild_decay-k32w4s32-pcp3blocks-b2prod"


@pytest.fixture
def device() -> Iterator[torch.device]:
    with torch.no_grad(), emulated_cuda():
        yield torch.device("cuda")


class Noted(TorchNativePcpBackend):
    """Notes what each rank is given."""

    capabilities = TorchNativePcpBackend.capabilities.with_changes(server={"eager_without_waits": False})
    seen: ClassVar[list[dict[str, Any]]] = []

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer is self.context.layers[0]:
            names = ("positions", "pcp_rows", "seq_lens", "extend_prefix_lens", "extend_seq_lens", "extend_start_loc")
            found = {name: getattr(batch, name).cpu().tolist() for name in names}
            lens = (batch.extend_seq_lens_cpu, batch.extend_num_tokens)
            rows = (len(q), len(k), len(batch.out_cache_loc), len(batch.input_ids))
            self.seen.append({**found, "host": lens, "rows": rows, "rank": self.context.pcp_rank})
        return super().forward(q, k, v, layer, batch, save_kv_cache, out=out)


class NotedStates(TorchNativeStatePcpBackend):
    """Notes which requests each rank begins."""

    capabilities = TorchNativeStatePcpBackend.capabilities.with_changes(server={"eager_without_waits": False})
    seen: ClassVar[list[tuple[int, list[bool], int]]] = []

    @override
    def forward(  # type: ignore[override]
        self, mixed: torch.Tensor, a: Any, b: Any, layer: StateLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        if layer.layer_id == self.context.layers[0].layer_id:
            assert batch.state is not None
            assert batch.state.has_initial_state is not None
            self.seen.append((self.context.pcp_rank, batch.state.has_initial_state.cpu().tolist(), len(mixed)))
        return super().forward(mixed, a, b, layer, batch)


def findings(backend: type[AttentionBackend], case: str) -> list[Finding]:
    report = check_backend(backend, cases=[case], executions=["eager"], device="cpu")
    return [found for row in report.rows for found in row.findings]


def test_a_rank_gets_its_rows_and_the_keys_of_all() -> None:
    Noted.seen.clear()
    assert check_backend(Noted, cases=[ZIGZAG], executions=["eager"], device="cpu")
    first = {each["rank"]: each for each in reversed(Noted.seen[:3])}
    assert [first[rank]["pcp_rows"] for rank in range(3)] == [[0, 1, 8, 9], [2, 3, 7, 10], [4, 5, 6, 11]]
    assert first[1]["positions"] == [7, 8, 12, 1]
    assert first[1] == {
        "positions": [7, 8, 12, 1],
        "pcp_rows": [2, 3, 7, 10],
        "seq_lens": [14, 3],
        "extend_prefix_lens": [5, 0],
        "extend_seq_lens": [3, 1],
        "extend_start_loc": [0, 3],
        "host": ([3, 1], 4),
        "rows": (4, 12, 12, 4),
        "rank": 1,
    }


def test_a_rank_begins_from_zeros_only_if_no_token_precedes_its_rows() -> None:
    NotedStates.seen.clear()
    assert check_backend(NotedStates, cases=[STATES], executions=["eager"], device="cpu")
    assert NotedStates.seen[:3] == [(0, [True, False], 4), (1, [True, True], 3), (2, [True, True], 2)]


def test_each_rank_has_a_pool_and_a_table_of_its_own(device: torch.device) -> None:
    schedule = make_schedule(parse_case(ZIGZAG))
    harness = ServerHarness(TorchNativePcpBackend, [schedule], device, declared=TorchNativePcpBackend.capabilities)
    assert isinstance(harness.backend, RowRanks)
    contexts = [instance.context for instance in harness.backend.instances]
    assert [(each.pcp_rank, each.pcp_world_size, each.dcp_world_size) for each in contexts] == [
        (rank, 3, 1) for rank in range(3)
    ]
    assert len({id(each.kv_pool) for each in contexts}) == 3
    harness.load(schedule, schedule.steps[0])
    tables = [each.req_to_token.cpu() for each in contexts]
    assert not torch.equal(tables[0], tables[1]), "pages of ranks are in different orders"
    assert all(not each.kv_groups for each in contexts)


def test_an_undeclared_order_is_refused(device: torch.device) -> None:
    class Blocks(TorchNativePcpBackend):
        capabilities = TorchNativePcpBackend.capabilities.with_changes(prefill_ranks={"orders": {"blocks"}})

    schedule = make_schedule(parse_case(ZIGZAG))
    with pytest.raises(Unsupported, match="prefill ranks with rows in the order"):
        ServerHarness(Blocks, [schedule], device, declared=TorchNativePcpBackend.capabilities)


def test_no_graph_runs_a_prompt_whose_rows_are_dealt() -> None:
    class InGraphs(TorchNativePcpBackend):
        capabilities = TorchNativePcpBackend.capabilities.with_changes(graph={"extend"})

    report = check_backend(InGraphs, cases=[ZIGZAG], device="cpu")
    assert report
    assert [row.execution for row in report.rows if row.status == "passed"] == ["eager"]


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            q_row_ranks.RowsOfRankFollowThePrefix,
            "took its row 2 of request 0 for row 2 of the prompt's new rows; it is row 8: its rows are not the first "
            "ones of the prompt",
        ),
        (q_row_ranks.RankOfAnotherGroup, "these are rows of rank 0: look at pcp_rank"),
        (q_row_ranks.RowsOfTheFirstRequestsLength, "the blocks are planned for the rows of request 0"),
        (q_row_ranks.RankAttendsToItsOwnRows, "gather k and v of the rows of all ranks"),
        (q_row_ranks.RankStoresItsOwnRows, "rank 0 stored only the rows that it computes"),
    ],
)
def test_the_mistake_of_a_rank_is_named(backend: type[AttentionBackend], said: str) -> None:
    case = ZIGZAG.replace("gqa3x2", "gqa4x2")
    texts = [text for found in findings(backend, case) for text in (found.headline, found.hint)]
    assert any(said in text for text in texts), texts


def test_only_the_rank_that_stores_wrong_rows_is_named() -> None:
    case = ZIGZAG.replace("gqa3x2", "gqa4x2")
    found = next(each for each in findings(q_row_ranks.RowsAreStoredInTheOrderOfRanks, case))
    assert found.check == "writes-own-kv"
    assert "on rank 1 a slot of this step's tokens does not hold their K and V" in found.headline
    assert "rank 0" not in found.spread


def test_a_state_that_does_not_pass_to_the_next_rank_is_found() -> None:
    case = STATES.replace("gdn2x2-d32", "gdn4x2-d64").replace("k32w4", "k64w4")
    assert check_backend(controls_of_row_ranks.StateOfRanks, cases=[case], executions=["eager"], device="cpu")
    for wrong in (r_state_ranks.RankBeginsFromZeros, r_state_ranks.RankContinuesTheStateBeforeTheStep):
        assert "matches-oracle" in {found.check for found in findings(wrong, case)}
