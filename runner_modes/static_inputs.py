"""The device buffers that every graph of one runner reads: one block of memory, filled by one transfer per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.packing import Bytes, Place, Sent, pack_places, sent_alone
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload_into

from .harness import ServerHarness
from .step_tensor import Buffers, Filling, StepTensor


@dataclass(frozen=True)
class StaticInputs(Buffers):
    """Buffers whose heads are live and whose tails are padding."""

    declared: Mapping[str, StepTensor] = field(repr=False)
    """Tensors that have a buffer by name, in the order in which messages name them."""
    custom_mask: torch.Tensor
    """Flat bool mask buffer of the runner, for the captured batch if the backend has none. It is never updated."""
    left: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    """Contents of ``host`` if a server resets nothing: the contents after the last replay with this number of live
    rows."""
    memory: torch.Tensor = field(repr=False)
    """Device memory of the buffers, [n] uint8."""
    staged: Bytes = field(repr=False)
    """Memory of ``host``, [n], which ``send`` copies to the device."""
    places: tuple[Place, ...] = field(repr=False)
    """Places of buffers in ``memory`` and ``staged``."""

    def send(self) -> None:
        """Copy ``host`` to the buffers."""
        with past_modes():
            upload_into(self.memory, torch.from_numpy(self.staged))
            self.seq_lens_cpu.numpy()[:] = self.host["seq_lens"]

    def fill(self, filling: Filling) -> None:
        """Write the numbers of a step into ``host``, and padding after them."""
        with past_modes():
            for name, tensor in self.declared.items():
                tensor.fill_into(self.host[name], filling)
        self.pad(filling.step, filling.step.tokens, filling.harness.model.nan_row)

    def pad(self, step: Step, rows: int, nan_row: int) -> None:
        """Fill the entries after the live requests of ``step`` and its ``rows`` live rows, which may be stale, as its
        padding says."""
        for name, left in self.left.items():
            tensor = self.declared[name]
            live = rows if tensor.per == "row" else step.bs
            zeroed = tensor.stale == "asked" and step.padding != "stale"
            self.host[name][live:] = 0 if zeroed else left[live:]
            left[:live] = self.host[name][:live]
        if step.padding == "nan":
            self.host["input_ids"][rows:] = nan_row

    def sent(self, bs: int, *, spec: bool, mask: bool) -> tuple[Sent, ...]:
        """Memory that a graph of ``bs`` requests may not write, with its contents.

        ``spec``: true if its batch has a ``spec_info``. ``mask``: true if the backend got the runner's mask.
        """
        watched = [(place, self.declared[place.name]) for place in self.places if self.counts[place.name]]
        places = tuple(
            replace(
                place,
                name=tensor.named(spec=spec),
                shape=(bs * self.counts[place.name] + tensor.more, *place.shape[1:]),
            )
            for place, tensor in watched
            if tensor.watched
        )
        sent = [Sent(places, self.memory, self.staged)]
        sent.append(sent_alone("batch.seq_lens_cpu", self.seq_lens_cpu[:bs], self.host["seq_lens"][:bs].view(np.uint8)))
        if mask and (size := self.custom_mask.numel()):
            sent.append(sent_alone("batch.spec_info.custom_mask", self.custom_mask, np.ones(size, np.uint8)))
        return tuple(sent)


def make_static_inputs(
    harness: ServerHarness, schedule: Schedule, fill: int, tensors: Sequence[StepTensor]
) -> StaticInputs:
    """Make buffers as before a capture: lengths at ``fill``, accept counts at N, tokens and rows zero."""
    context, case, max_bs = harness.context, schedule.case, schedule.max_bs
    counts = {each.name: each.count(context, case) for each in tensors}
    packing = pack_places(
        tuple((each.name, each.dtype, (max_bs * counts[each.name] + each.more, *each.columns)) for each in tensors)
    )
    staged = packing.fresh()
    host = packing.arrays(staged)
    for each in tensors:
        each.pad(host[each.name], harness, schedule, fill)
    memory = torch.empty(packing.size, dtype=torch.uint8, device=harness.device)
    mask_size = max_bs * case.width * (fill + case.width) if context.topk else 0
    static = StaticInputs(
        schedule=schedule,
        tensors=packing.tensors(memory),
        host=host,
        seq_lens_cpu=torch.zeros(max_bs, dtype=torch.int64),
        counts=counts,
        declared={each.name: each for each in tensors},
        custom_mask=torch.ones(mask_size, dtype=torch.bool, device=harness.device),
        left={each.name: host[each.name].copy() for each in tensors if each.stale},
        memory=memory,
        staged=staged,
        places=packing.places,
    )
    static.send()
    return static
