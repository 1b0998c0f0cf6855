"""Class R, layers that compress keys: places in groups, windows, rotations, and the rows that are written."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, CompressorLayer, ForwardBatch

from .catalogue import fault
from .compressors import CompressorParent, PackedParent


@fault("general", "writes-own-kv", "its bias is that of place")
class BiasOfTheGroupsNumber(CompressorParent):
    """The bias of a score is taken by the number of the group, and not by the place of the token in it."""

    def place(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        return positions // layer.compress_ratio % layer.compress_ratio


@fault("general", "writes-own-kv", "of layer")
class BiasOfTheFirstCompressor(CompressorParent):
    """All layers add the bias of the first."""

    def bias_of(self, layer: CompressorLayer) -> torch.Tensor:
        return super().bias_of(self.pool.layers[0])


@fault("general", "writes-own-kv", "it is rounded to bf16")
class ScoresStoredInTheModelsDtype(CompressorParent):
    """A score is rounded to bf16 before it is stored, although the pool holds float32."""

    def stored_score(self, score: torch.Tensor) -> torch.Tensor:
        return score.bfloat16().float()


@fault("general", "writes-own-kv matches-oracle", "halves of the columns are exchanged")
class HalvesOfColumnsExchanged(CompressorParent):
    """A group reads the columns that are for the group after it, and those of the group before for itself."""

    def is_own(self, layer: CompressorLayer, back: int) -> bool:
        return not super().is_own(layer, back)


@fault("general", "writes-own-kv matches-oracle", "own group only")
class GroupBeforeIsNotRead(CompressorParent):
    """Groups do not overlap: the window is that of a layer of the other kind."""

    def exists(self, layer: CompressorLayer, at: torch.Tensor, back: int) -> torch.Tensor:
        return super().exists(layer, at, back) & self.is_own(layer, back)


@fault("general", "writes-own-kv matches-oracle", "the first group lacks count in the softmax")
class MissingTokensHaveScoreZero(CompressorParent):
    """The group before the first one is read as zeros, whose scores take part in the softmax."""

    def score_of_nothing(self) -> float:
        return 0.0


@fault("general", "writes-own-kv matches-oracle", "one token early")
class WindowOneTokenEarly(CompressorParent):
    """The window ends before the token that completes the group."""

    def read_at(self, at: torch.Tensor) -> torch.Tensor:
        return at - 1


@fault("general", "writes-own-kv matches-oracle", "position of its last token")
class RotatedByTheLastToken(CompressorParent):
    """A row is rotated by the position of the token that completes it."""

    def turned_by(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        return positions


@fault("general", "writes-own-kv matches-oracle", "number of its group")
class RotatedByTheGroupsNumber(CompressorParent):
    """A row is rotated by its number among the compressed rows."""

    def turned_by(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        return positions // layer.compress_ratio


@fault("general", "writes-own-kv matches-oracle", "first half of the numbers with the second")
class RotatedInHalves(CompressorParent):
    """The rotation pairs number i with number i + 32, as in layers of NeoX."""

    def turned(self, row: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        cos, sin = self.table[by].chunk(2, -1)
        kept, x, y = row[:, :-64], row[:, -64:-32], row[:, -32:]
        return torch.cat([kept, x * cos - y * sin, y * cos + x * sin], -1)


@fault("general", "writes-own-kv matches-oracle")
class EpsilonOfTheFirstLayer(CompressorParent):
    """All layers are normalized with the epsilon of the first."""

    def epsilon(self, layer: CompressorLayer) -> float:
        return self.pool.layers[0].norm_eps


@fault("general", "writes-own-kv", "whose group no token of this step completes")
class RowsOfUnfinishedGroupsStored(CompressorParent):
    """Every token stores a row, also in groups that are not complete."""

    def stored(self, layer: CompressorLayer, positions: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(complete)


@fault("general", "writes-own-kv", "whose group no token of this step completes")
class PageOfTheTokensCount(CompressorParent):
    """The page of a compressed row is found with the tokens of a page, although it holds fewer compressed rows."""

    def target(
        self, layer: CompressorLayer, slots: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        size, rows = self.context.page_size, self.context.page_size // layer.compress_ratio
        number = positions // layer.compress_ratio
        first = pages[self.requests, number // size * size].long()
        return first // layer.compress_ratio + number % rows


@fault("general", "writes-own-kv matches-oracle", "only of tokens of this step", modes="extend target-verify")
class OnlyGroupsThatBeginInTheStep(CompressorParent):
    """A group of which a part came in an earlier step is made only of the rows of this step."""

    def exists(self, layer: CompressorLayer, at: torch.Tensor, back: int) -> torch.Tensor:
        return super().exists(layer, at, back) & (at >= self.firsts)


@fault("general", "writes-own-kv matches-oracle", modes="target-verify")
class GroupsByTheLengthOfTheRequest(CompressorParent):
    """The host's rule of a decode serves a draft: all its rows complete a group if the request's length does."""

    def completes(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        return self.lens[self.requests] % layer.compress_ratio == 0


@fault("general", "writes-own-kv matches-oracle replay-follows-batch", executions="graph")
class GroupsOfTheCapture(CompressorParent):
    """The plan counts the rows that complete a group on the host, and a graph keeps those of its capture."""

    bucket = 0

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[int, torch.Tensor] = {}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.kept[batch.batch_size] = batch.positions.long().clone()
        self.bucket = batch.batch_size

    def completes(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        return super().completes(
            layer, self.kept[self.bucket] if torch.cuda.is_current_stream_capturing() else positions
        )


@fault("general", "writes-own-kv")
class ScaleOfTheFirstTile(PackedParent):
    """All tiles of a packed row are divided by the scale of the first."""

    def exponents(self, exact: torch.Tensor) -> torch.Tensor:
        return exact[:, :1].expand_as(exact)


@fault("general", "writes-own-kv")
class ScalesAfterEachRow(PackedParent):
    """The scales of a row are stored after its numbers, and not after the numbers of the page."""

    def first_of_numbers(self, place: torch.Tensor) -> torch.Tensor:
        return place * 584

    def first_of_scales(self, place: torch.Tensor, rows: int) -> torch.Tensor:
        return place * 584 + 576


@fault("general", "writes-own-kv")
class ScalesOfAnotherFp8(PackedParent):
    """Scales are those of e5m2, whose largest number is 57,344: they are too small, and numbers saturate."""

    def exponents(self, exact: torch.Tensor) -> torch.Tensor:
        return exact - 7
