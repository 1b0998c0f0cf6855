import numpy as np
import pytest

from attn_testkit.cases.trees import Tree, accept_greedily, bit_packed, chain, from_scores, full_mask, random_tree

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


def test_greedy_walk_accepts_the_servers_path(trees: list[Tree]) -> None:
    candidates = np.array([[10, 11, 12, 13, 15, 19], [30, 31, 32, 33, 35, 37]])
    predict = np.array([[12, 99, 15, 99, 77, 99], [31, 33, 99, 37, 99, 99]])
    predicts, accept_index, accepted = accept_greedily(trees, candidates, predict, steps=3)
    assert predicts.tolist() == [12, 0, 15, 0, 77, 0, 31, 33, 0, 37, 0, 0]
    assert accept_index.tolist() == [[0, 2, 4, -1], [6, 7, 9, -1]]
    assert accepted.tolist() == [2, 2]


def test_the_smallest_sibling_wins_a_tie() -> None:
    tree = Tree((0, 0, 0))
    _, accept_index, _ = accept_greedily([tree], np.array([[1, 7, 7, 7]]), np.array([[7, 0, 0, 0]]), steps=1)
    assert accept_index.tolist() == [[0, 1]]


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
