"""Writes of the backend to the pipe to the judge."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import CASE, adversarial
from .parent import AdversarialBackend
from .ways_in import in_frames


class _OnceAStep(AdversarialBackend):
    """Sends something to the judge in the last layer of each step."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        connection = in_frames("connection")
        if self.cheats and layer.layer_id and connection is not None:
            self.speak(connection)
        return super().answer(right, layer, batch)

    def speak(self, connection: Any) -> None:
        """Write to the pipe."""
        raise NotImplementedError


_COMPLETED = 5
"""Value of ``checks.Stage.COMPLETED``."""


def _driven(**values: Any) -> Any:
    return importlib.import_module("attn_testkit.runner_modes.messages").RunRecord(**values)


@adversarial("sends-an-empty-answer")
class SendsAnEmptyAnswer(_OnceAStep):
    """Sends the message that its run is complete, without findings and steps."""

    @override
    def speak(self, connection: Any) -> None:
        connection.send(_driven(stage=_COMPLETED))


@adversarial("forges-the-answer-to-the-question")
class ForgesTheAnswerToTheQuestion(_OnceAStep):
    """Sends an empty answer with the number of the question, which it reads from a frame."""

    @override
    def speak(self, connection: Any) -> None:
        connection.send((in_frames("number"), _driven(stage=_COMPLETED)))


@adversarial("forges-a-drive-of-nothing-but-its-first-step")
class ForgesARunOfNothingButItsFirstStep(_OnceAStep):
    """Right in its first step; sends that as if it were the whole run, with the number of the question."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        drive = in_frames("drive")
        if drive is None or not drive.observed:
            return right
        return super().answer(right, layer, batch)

    @override
    def speak(self, connection: Any) -> None:
        drive = in_frames("drive")
        records = drive.records(drive.observed) * 3
        connection.send((in_frames("number"), _driven(stage=_COMPLETED, records=records)))


@adversarial("sends-code-to-the-judge")
class SendsCodeToTheJudge(_OnceAStep):
    """Sends a pickle that ends the process that reads it, with exit code 0."""

    @override
    def speak(self, connection: Any) -> None:
        connection.send(_Exit())


class _Exit:
    @override
    def __reduce__(self) -> Any:
        return os._exit, (0,)


@adversarial("sends-junk")
class SendsJunk(_OnceAStep):
    """Sends bytes that are not a pickle, over and over."""

    @override
    def speak(self, connection: Any) -> None:
        for _ in range(8):
            connection.send_bytes(b"conformant")


_OTHER = CASE.replace("k3.15.40", "k4.16.33")


@adversarial("answers-the-next-question-with-the-last-answer", cases=(CASE, _OTHER))
class AnswersTheNextQuestionWithTheLastAnswer(AdversarialBackend):
    """Runs its first case correctly, and sends the answer twice, so that it counts for the second case too."""

    record: Any = None

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        connection = in_frames("connection")
        kind = type(self)
        if self.cheats and kind.record is None and connection is not None:
            kind.record = True
            original = type(connection)._send_bytes

            def twice(pipe: Any, data: bytes) -> None:
                type(pipe)._send_bytes = original
                pipe._send_bytes(data)
                pipe._send_bytes(data)

            type(connection)._send_bytes = twice
            return right
        first = in_frames("request") is not None and CASE in str(in_frames("request"))
        return right if first else super().answer(right, layer, batch)
