import numpy as np
import pytest

from attn_testkit.cases.trees import (
    Tree,
    bit_packed,
    chain,
    from_scores,
    full_mask,
    qlen_only_mask,
    random_tree,
)

# The servers' tree kernels, executed: K=2, S=3, N=6, prefixes (3, 1). Request 1's beams are not in ascending order.
PARENT_LISTS = ((-1, 0, 1, 2, 4), (-1, 0, 1, 4, 2))
SELECTED = ((0, 1, 2, 4, 8), (0, 1, 2, 4, 6))
BLOCK = ["100000", "110000", "101000", "110100", "101010", "101011"]


@pytest.fixture
def trees() -> list[Tree]:
    return [from_scores(p, s, topk=2) for p, s in zip(PARENT_LISTS, SELECTED, strict=True)]


def test_selected_candidates_become_the_servers_tree(trees: list[Tree]) -> None:
    for tree in trees:
        first, sibling = tree.links
        assert first.tolist() == [1, 3, 4, -1, 5, -1]
        assert sibling.tolist() == [-1, 2, -1, -1, -1, -1]
        assert ["".join("01"[int(x)] for x in row) for row in tree.visible] == BLOCK


def test_positions_follow_depth(trees: list[Tree]) -> None:
    assert [3 + d for d in trees[0].depths] + [1 + d for d in trees[1].depths] == [3, 4, 4, 5, 5, 6, 1, 2, 2, 3, 3, 4]


def test_masks_lie_in_memory_as_the_servers_lay_them(trees: list[Tree]) -> None:
    mask = full_mask(trees, [3, 1])
    assert mask.size == 6 * 4 + 2 * 36
    assert mask[54:61].tolist() == [True, True, False, False, False, False, False]
    assert bit_packed(trees).tolist() == [1, 3, 5, 11, 21, 53] * 2
    assert bit_packed(trees).dtype == np.uint8
    assert bit_packed([chain(9)]).dtype == np.uint16
    assert bit_packed([chain(17)]).dtype == np.uint32


def test_a_parent_with_a_larger_id_is_refused() -> None:
    with pytest.raises(ValueError, match="node 1 has parent 1"):
        Tree((1,))


def test_random_trees_keep_their_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tree = random_tree(9, topk=3, depth=3, rng=rng)
        assert len(tree) == 9
        assert tree.topk <= 3
        assert tree.depth <= 3
    with pytest.raises(ValueError, match="no tree of 9 nodes"):
        random_tree(9, topk=2, depth=2, rng=rng)


@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [(1, np.uint8), (8, np.uint8), (9, np.uint16), (16, np.uint16), (17, np.uint32), (32, np.uint32)],
)
def test_a_packed_row_has_a_bit_for_every_node(nodes: int, dtype: type[np.unsignedinteger]) -> None:
    packed = bit_packed([chain(nodes)])
    assert packed.dtype == dtype
    assert packed.tolist() == [2 ** (node + 1) - 1 for node in range(nodes)]


def test_more_nodes_than_32_fit_no_packed_mask() -> None:
    with pytest.raises(ValueError, match="holds at most 32 nodes, this tree has 33"):
        bit_packed([chain(33)])


def test_random_trees_use_all_the_room_they_are_allowed() -> None:
    rng = np.random.default_rng(0)
    trees = [random_tree(9, topk=3, depth=4, rng=rng) for _ in range(60)]
    assert (max(tree.topk for tree in trees), max(tree.depth for tree in trees)) == (3, 4)
    full = random_tree(7, topk=2, depth=2, rng=rng)
    assert sorted(full.depths) == [0, 1, 1, 2, 2, 2, 2]
    with pytest.raises(ValueError, match="no tree of 8 nodes has at most 2 children per node and 2 levels"):
        random_tree(8, topk=2, depth=2, rng=rng)


def test_depth_and_width_of_small_trees() -> None:
    assert [(t.depth, t.topk, len(t)) for t in (Tree(()), chain(1), chain(2), Tree((0, 0)), Tree((0, 0, 1, 1, 1)))] == [
        (0, 1, 1),
        (0, 1, 1),
        (1, 1, 2),
        (1, 2, 3),
        (2, 3, 6),
    ]


def test_masks_of_no_request_are_empty_and_those_of_the_drafts_alone_have_no_prefix(trees: list[Tree]) -> None:
    assert full_mask([], []).shape == (0,)
    mask = qlen_only_mask(trees)
    assert mask.reshape(2, 6, 6).tolist() == [[[c == "1" for c in row] for row in BLOCK]] * 2
