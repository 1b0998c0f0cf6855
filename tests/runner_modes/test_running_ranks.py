"""Ranks in one process: the memory and the batches of each instance, and the failure of a rank that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.ranks import Ranks
from in_process import check_backend

from attn_testkit.backends.torch_native_ranks import TorchNativeRanksBackend
from attn_testkit.backends.torch_native_sparse_ranks import TorchNativeSparseRanksBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.kv_splits import splits_of
from attn_testkit.contract import AttentionBackend, BackendContext, ForwardBatch, KVSplit, Unsupported
from attn_testkit.results.finding import Finding
from attn_testkit.steps.data import make_step_data, stored_kv
from attn_testkit.steps.ranks import places_on_ranks
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import controls_of_selections, q_ranks, s_selected_on_ranks
from cuda_on_cpu import emulated_cuda

GQA = "decode-gqa3x2-d64-bf16-p4-k9.0.6.30-shuffled-gauss-ranks3by2-b4prod"
MERGED = GQA.replace("ranks3by2", "ranks3by2merged")
POOLS = [
    GQA,
    "target-verify-mla4-d64r64-bf16-p4-k7.0.1.70-t0.0.1.2-reversed-gauss-ranks2by4-b5prod",
    "draft-extend-gqa3x2-d64-bf16-p16-k21-n6a6-reversed-gauss-kvfp8e4m3-ranks4by5-b4small",
    "extend-gqa3x2-d64-bf16-p4-k7.0.4.8.1.12-n2a2.1.2.1.2.1-reversed-gauss-ranks8by3-b7prod",
]


@pytest.fixture
def device() -> Iterator[torch.device]:
    with torch.no_grad(), emulated_cuda():
        yield torch.device("cuda")


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.cpu().contiguous().view(torch.uint8)


def is_nan(rows: torch.Tensor) -> torch.Tensor:
    return rows.cpu().float().isnan()


@pytest.mark.parametrize("case_id", POOLS)
def test_each_key_is_in_the_pool_of_one_rank_and_everything_else_is_poison(case_id: str, device: torch.device) -> None:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(TorchNativeRanksBackend, [schedule], device, declared=TorchNativeRanksBackend.capabilities)
    assert isinstance(harness.backend, Ranks)
    for step in (*schedule.steps[:3], schedule.second):
        harness.load(schedule, step)
        slots, rows = stored_kv(schedule, step, make_step_data(schedule, step), after=step.stored)
        places, found = places_on_ranks(schedule, step), 0
        for rank, instance in enumerate(harness.backend.instances):
            keys = instance.context.kv_pool.get_key_buffer(0)
            mine = places.rank[slots] == rank
            held = keys[torch.from_numpy(places.slot[slots[mine]])]
            assert torch.equal(bits(held).flatten(), torch.from_numpy(rows[0, 0, mine].copy()).flatten())
            others = torch.ones(len(keys), dtype=torch.bool)
            others[torch.from_numpy(places.slot[slots[mine]])] = False
            assert is_nan(keys[others]).all(), "page 0, page tails and slots after the keys of the rank"
            found += len(held)
        assert found == len(slots)


@dataclass(frozen=True)
class _Seen:
    """What an instance was given at a plan."""

    rank: int
    table: torch.Tensor
    batch: dict[str, Any]


class Spy(TorchNativeRanksBackend):
    """Healthy; remembers what it was given."""

    seen: ClassVar[list[_Seen]] = []
    asked: ClassVar[list[tuple[int, bool]]] = []
    most: ClassVar[int] = 3
    """Plans that are remembered: a backend must not keep more and more device memory."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert batch.dcp_local_seq_lens is not None
        assert batch.group_cache_locs is None
        given = {
            name: getattr(batch, name) for name in ("out_cache_loc", "dcp_local_seq_lens", "seq_lens", "positions")
        }
        rows = {name: value.clone() for name, value in given.items()}
        table = self.context.req_to_token[batch.req_pool_indices.long()].clone()
        if len(self.seen) < self.most:
            self.seen.append(_Seen(self.context.dcp_rank, table, rows))
        super().init_forward_metadata_in_graph(batch)

    def forward_return_lse(self, *args: Any, part: KVSplit, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.context.kv_splits == (part,)
        assert (self.context.dcp_world_size, self.context.cp_kv_cache_interleave_size) == (part.ranks, part.interleave)
        if len(self.asked) < 12:
            self.asked.append((part.rank, more.get("save_kv_cache", True)))
        return super().forward_return_lse(*args, part=part, **more)


def test_a_rank_gets_its_own_slots_and_lengths_and_the_global_rest() -> None:
    Spy.seen.clear()
    assert check_backend(Spy, cases=[GQA], executions=["eager"], device="cpu")
    first = {each.rank: each for each in Spy.seen[:3]}
    assert sorted(first) == [0, 1, 2]
    lens = torch.stack([first[rank].batch["dcp_local_seq_lens"] for rank in range(3)])
    assert lens.dtype == torch.int32
    seq_lens = first[0].batch["seq_lens"]
    assert lens.sum(0).tolist() == seq_lens.tolist() == [10, 1, 7, 31]
    assert lens[:, 1].tolist() == [1, 0, 0], "a request with fewer keys than ranks"
    slots = torch.stack([first[rank].batch["out_cache_loc"] for rank in range(3)])
    assert (slots >= 0).sum(0).tolist() == [1, 1, 1, 1], "each token is stored by one rank"
    for request, length in enumerate(seq_lens.tolist()):
        owner = (length - 1) // 2 % 3
        assert slots[owner, request] == first[owner].table[request, int(lens[owner, request]) - 1]
    assert first[0].batch["positions"].tolist() == first[2].batch["positions"].tolist()
    assert not torch.equal(first[0].table, first[1].table), "each rank has its own request table"


def test_lengths_of_padded_and_captured_requests_add_up_to_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spy, "most", 24)
    for case in (POOLS[1].replace("-ranks2by4-b5prod", "-ranks3by1-b6prod"), POOLS[3]):
        Spy.seen.clear()
        assert check_backend(Spy, cases=[case], executions=["graph"], device="cpu")
        count = len(splits_of(parse_case(case)))
        verify = case.startswith("target-verify")
        plans = [Spy.seen[at : at + count] for at in range(0, len(Spy.seen), count)]
        for plan in plans:
            lens = torch.stack([each.batch["dcp_local_seq_lens"] for each in plan]).sum(0)
            rows = len(plan[0].batch["positions"]) // len(lens) if verify else 0
            assert lens.tolist() == (plan[0].batch["seq_lens"] + rows).tolist()


def test_ranks_run_in_the_order_that_the_case_says() -> None:
    cases = [f"decode-gqa3x2-d64-bf16-p4-k{length}-shuffled-gauss-ranks3by2-b1prod" for length in range(5, 13)]
    orders = {parse_case(case).derived("rank-order"): case for case in cases}
    for reverse, order in ((0, [0, 1, 2]), (1, [2, 1, 0])):
        Spy.seen.clear()
        Spy.asked.clear()
        assert check_backend(Spy, cases=[orders[reverse]], executions=["eager"], device="cpu")
        assert [each.rank for each in Spy.seen[:3]] == order
        assert [rank for rank, _ in Spy.asked[:6]] == order * 2, "in each layer"
        stores = {Spy.asked[at : at + 3] == [(rank, True) for rank in order] for at in range(0, len(Spy.asked), 3)}
        assert True in stores, "each rank stores its own tokens"


class Merges(TorchNativeRanksBackend):
    """Healthy; remembers which ranks merged."""

    ranks: ClassVar[list[int]] = []

    def merge_state(self, *results: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.ranks) < 4:
            self.ranks.append(self.context.dcp_rank)
        return super().merge_state(*results)


def test_each_rank_merges_its_result_with_those_of_the_ranks_after_it() -> None:
    Merges.ranks.clear()
    assert check_backend(Merges, cases=[MERGED], executions=["eager"], device="cpu")
    assert Merges.ranks == [1, 0, 1, 0], "in each layer, in one order whatever the order in which ranks attend"


def test_a_merge_that_leaves_out_a_rank_or_has_another_base_is_found() -> None:
    lacking = findings(q_ranks.FirstRankIsLeftOut, MERGED.replace("gqa3x2", "gqa2x2"))
    assert [found.check for found in lacking[:2]] == ["log-sum-exp", "matches-oracle"]
    assert "the merged result of merge_state" in lacking[0].headline
    other = findings(q_ranks.RanksAreMergedInBase2, MERGED.replace("gqa3x2", "gqa2x2"))[0]
    assert "KV splits are merged as if they were in the other base than declared" in other.hint


SELECTED = "decode-mqa4-d64-bf16-p4-k70.9.0.33-shuffled-gauss-sel16-ranks3by2-b4prod"


def test_a_selected_position_that_is_taken_for_a_local_index_is_named() -> None:
    found = findings(s_selected_on_ranks.SelectedPositionIsLocalIndex, SELECTED)[0]
    assert found.check == "log-sum-exp"
    assert re.search(r"rank \d used the selected position \d+ of request \d as a local index", found.hint)
    one = findings(s_selected_on_ranks.RankAttendsToAllSelected, SELECTED.replace("sel16", "sel1"))[0]
    assert re.search(r"rank \d attends to the selected position \d+ of request \d, which rank \d has", one.hint)


def test_each_rank_has_an_index_pool_with_the_index_keys_of_all_tokens() -> None:
    case = SELECTED.replace("sel16", "sel16-idx4")
    lacking = findings(s_selected_on_ranks.RankStoresOnlyItsIndexKeys, case)[0]
    assert lacking.check == "index-stored"
    assert lacking.where.startswith("rank 0 of 3, layer 0, request ")
    assert lacking.hint.startswith(
        "these are the tokens of other ranks: rank 0 of 3 stores the index keys of all tokens"
    )
    looked_up = findings(s_selected_on_ranks.RankLooksIndexKeysUpInItsKVTable, case)
    assert [found.check for found in looked_up[:2]] == ["log-sum-exp", "matches-oracle"]
    assert "rank 1 of 3" in looked_up[0].headline, "each rank attends to its own selection"
    assert check_backend(controls_of_selections.IndexerOfRank, cases=[case], executions=["graph"], device="cpu")


def test_ranks_with_selected_keys_pass_in_eager_and_graphs() -> None:
    case = SELECTED.replace("mqa4", "gqa3x2")
    assert check_backend(TorchNativeSparseRanksBackend, cases=[case], device="cpu")


def test_a_graph_with_a_tree_masks_rows_on_every_rank() -> None:
    assert check_backend(TorchNativeRanksBackend, cases=[POOLS[1]], executions=["graph"], device="cpu")


def test_an_instance_that_cannot_be_a_rank_refuses_the_context(device: torch.device) -> None:
    schedule = make_schedule(parse_case(GQA))
    declared = TorchNativeRanksBackend.capabilities

    class NoRank(TorchNativeRanksBackend):
        capabilities = declared.with_changes(lse=None)

    with pytest.raises(Unsupported, match="log-sum-exp of rank 0 of 3 is not declared"):
        ServerHarness(NoRank, [schedule], device, declared=declared)


def test_a_context_without_ranks_is_rank_0_of_1(device: torch.device) -> None:
    schedule = make_schedule(parse_case("decode-gqa3x2-d64-bf16-p4-k9-shuffled-gauss-b1prod"))
    context: BackendContext = ServerHarness(TorchNativeRanksBackend, [schedule], device).context
    assert (context.dcp_rank, context.dcp_world_size, context.cp_kv_cache_interleave_size) == (0, 1, 1)


def findings(backend: type[AttentionBackend], case: str) -> list[Finding]:
    results = check_backend(backend, cases=[case], executions=["eager"], device="cpu")
    return [finding for row in results.rows for finding in row.findings]


BORDERS = "decode-gqa2x2-d64-bf16-p4-k7.0.4.8.1.12-reversed-gauss-ranks2by4-b7prod"
BORDERS_OF_THREE_HEADS = BORDERS.replace("gqa2x2", "gqa3x2")


@pytest.mark.parametrize(
    ("backend", "check", "said"),
    [
        (
            q_ranks.RankStoresAtGlobalPosition,
            "writes-own-kv",
            "rank 0 used the global position 8 as a local slot; the local one is 4",
        ),
        (
            q_ranks.RankLoadsAtGlobalPosition,
            "log-sum-exp",
            "rank 1 used the global position 4 of a key of request 0 as a local slot; the local one is 0",
        ),
        (
            q_ranks.RankUsesGlobalLength,
            "log-sum-exp",
            "rank 0 used the global length 8 of request 0 as its local one, which is 4",
        ),
        (
            q_ranks.RankStoresRowsOfOthersInLastSlot,
            "writes-own-kv",
            "used the out_cache_loc of -1 as an index, which is the last slot",
        ),
    ],
)
def test_a_failure_names_the_rank_and_what_it_used(backend: type[AttentionBackend], check: str, said: str) -> None:
    found = findings(backend, BORDERS)
    assert found[0].check == check
    assert said in found[0].hint


class StoresOnRank0(TorchNativeRanksBackend):
    """All other ranks store nothing."""

    def _store(self, *args: Any) -> None:
        if self.context.dcp_rank == 0:
            super()._store(*args)


class StoresElsewhereToo(TorchNativeRanksBackend):
    """Rank 1 also writes what it stores to the slot after its keys of the first request."""

    def _store(self, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool) -> None:
        super()._store(k, v, layer, batch, save_kv_cache)
        if self.context.dcp_rank == 1:
            lens = batch.dcp_local_seq_lens[:1].long()
            slot = self.context.req_to_token[batch.req_pool_indices[:1].long(), lens].long()
            self.context.kv_pool.set_kv_buffer(layer, slot, torch.zeros_like(k[:1]), torch.zeros_like(v[:1]))


def test_a_token_that_no_rank_stores_and_a_slot_that_no_key_owns_are_found() -> None:
    lacking = findings(StoresOnRank0, BORDERS_OF_THREE_HEADS)[0]
    assert lacking.check == "writes-own-kv"
    assert "a slot of rank 1 does not hold K and V of its new token" in lacking.headline
    assert "rank 1 stored none of its new tokens" in lacking.hint
    stray = findings(StoresElsewhereToo, BORDERS_OF_THREE_HEADS)[0]
    assert stray.check == "writes-own-kv"
    assert "rank 1 wrote a slot that none of its keys owns" in stray.headline
    assert stray.spread == "unowned slots that were written: 1 on rank 1"


def test_a_rank_without_keys_that_gives_nan_is_found() -> None:
    found = findings(q_ranks.EmptyRankOutputIsNan, BORDERS)[0]
    assert found.check == "log-sum-exp"
    assert "request 1 has no key in rank 1 of 2, but its output there is NaN or Inf" in found.headline
