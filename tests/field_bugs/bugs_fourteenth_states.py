"""Recurrent states; bugs of the fourteenth set."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.faults.catalogue import bug
from attn_testkit.faults.states import StateParent
from attn_testkit.faults.states_of_servers import SlotsParent, SnapshotsParent


class KDA(StateParent):
    """The parent for KDA: a gate for each channel of a key."""

    capabilities = StateParent.capabilities.with_changes(
        families={"kda"}, gqa_ratios={1}, state=replace(StateParent.declared_state(), k_dims={64, 96})
    )

    def gates(self, a, b, layer):
        raw = a.view(len(a), layer.v_heads, layer.k_dim) + layer.dt_bias
        rate = torch.exp(layer.A_log)[:, None]
        if layer.lower_bound is None:
            decay = torch.exp(-rate * torch.nn.functional.softplus(raw))
        else:
            decay = torch.exp(layer.lower_bound * torch.sigmoid(rate * raw))
        return decay[:, :, None], torch.sigmoid(b)[..., None]

    def token(self, rows, state, gates, layer):
        decay, beta = gates
        ones = torch.ones(len(state), layer.v_heads, 1, device=state.device)
        return super().token(rows, state * decay, (ones, beta), layer)


@bug(
    "flash-linear-attention #1135",
    "target-verify-kda1x2-d64-bf16-p16-k17.3-chain4-shuffled-mild_decay-k96w4s32-b2prod",
    "replay-follows-batch",
    execution="graph",
)
class GatesOfNextHead(KDA):
    """Channels of the next power of two have the gates that lie behind a head's, and states of 0."""

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        width = 1 << (layer.k_dim - 1).bit_length()
        there = a.untyped_storage().nbytes() // a.dtype.itemsize
        memory = a.as_strided((there,), (1,), 0)
        row, head = (torch.arange(n, device=a.device) for n in (len(a), layer.v_heads))
        first = a.storage_offset() + row[:, None] * a.stride(0) + head * layer.k_dim
        at = first[..., None] + torch.arange(layer.k_dim, width, device=a.device)
        # What lies behind the allocation is nobody's; 0 is the kindest of it.
        behind = torch.where(at < there, memory[at.clamp(max=there - 1)].float(), 0.0)
        return out + (0.0 * torch.exp(-torch.nn.functional.softplus(behind))).sum(-1, keepdim=True).to(out.dtype)


@bug("flashinfer #4311", "extend-gdn4x2-d64-bf16-p16-k0.40-n34a65.3-shuffled-mild_decay-k64w4s32-layers1from0-b2stale")
class DecayOfThread(StateParent):
    """A block's state has the decay up to token 57, 59, 61 or 63 of 64, by its column, not up to the block's end."""

    capabilities = StateParent.capabilities.with_changes(
        families={"gdn"}, eager={"extend"}, graph=(), max_topk=0, max_q_rows=1
    )

    def forward(self, mixed, a, b, layer, batch):
        self.factor = None
        return super().forward(mixed, a, b, layer, batch)

    def gates(self, a, b, layer):
        self.decay, beta = super().gates(a, b, layer)
        return self.decay, beta

    def kept_state(self, before, after, token):
        at = token % 64
        if self.factor is None or not at:
            self.factor = torch.ones_like(after[..., :1])
        column = 57 + 2 * (torch.arange(after.shape[2], device=after.device) % 4)
        missing = (at > column)[None, None, :, None]
        self.factor = torch.where(missing, self.factor / self.decay[..., None].clamp(min=1e-30), self.factor)
        ends = (self.counts - 1 == token) | (at == 63)
        return torch.where(ends[:, None, None, None], after * self.factor, after)


@bug("flashinfer #4219", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "output-contract")
class OutputIsKept(StateParent):
    """Without an output given, the same tensor is returned for each call of a number of rows."""

    capabilities = StateParent.capabilities.with_changes(server={"output_lifetime": "model"})

    def forward(self, mixed, a, b, layer, batch):
        out = super().forward(mixed, a, b, layer, batch)
        kept = self.__dict__.setdefault("outputs", {}).setdefault(out.shape, torch.empty_like(out))
        return kept.copy_(out)


@bug(
    "flashinfer #3490",
    "decode-gdn4x2-d64-bf16-p16-k0.33.0.4-shuffled-no_decay-k64w4s32.strided-layers1from0-b5stale",
    "state-matches-oracle",
)
class PoolIsCopied(StateParent):
    """A pool whose slots lie apart is reshaped to a contiguous one, and the copy is updated."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, state=replace(StateParent.declared_state(), strided=True), max_topk=0
    )

    def pools(self, layer):
        conv, temporal = super().pools(layer)
        return conv, temporal.contiguous()


@bug(
    "vllm-ascend #12255",
    "extend-gdn4x2-d64-bf16-p16-k64-n5a5-shuffled-no_decay-k64w4s32-layers1from0-b1stale",
    "writes-own-state",
)
class EndOfPromptIsADecode(StateParent):
    """A prefill of one row per request is run as a decode, in buffers that the last step filled."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode"}, max_topk=0, max_q_rows=1
    )
    kept = None

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        one_row = batch.forward_mode == "extend" and self.most == 1 and min(batch.extend_prefix_lens_cpu, default=0)
        if one_row and self.kept is not None:
            count = torch.arange(len(self.index), device=self.index.device)
            index, live = self.kept
            there = count < len(index)
            at = count.clamp(max=len(index) - 1)
            self.index = torch.where(there, index[at], 0)
            self.live = there & live[at]
        else:
            self.kept = self.index, self.live


class EmptyRequestsNotCounted(StateParent):
    """Chunks are numbered by requests that have rows, and lengths are looked up by that number among all requests."""

    capabilities = StateParent.capabilities.with_changes(eager={"extend"}, graph=(), max_topk=0, max_q_rows=1)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        has = self.counts > 0
        number = (has.cumsum(0) - 1).clamp(min=0)
        self.counts = torch.where(has, self.counts[number], 0)


@bug(
    "sglang #38994",
    "target-verify-gdn4x2-d64-bf16-p16-k5.1.30-chain6-shuffled-unit_keys-k64w4s32.slots-b4prod",
    "replay-follows-batch",
    execution="graph",
)
class AcceptedAtCapture(SlotsParent):
    """The list of accepted nodes is made before the capture, and no replay renews it."""

    at_capture = None

    def init_forward_metadata(self, batch):
        self.at_capture = None
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.at_capture = self.last_accepted(batch.state.num_accepted).clone()
            self.__dict__.setdefault("of_captures", []).append(self.at_capture)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        if self.at_capture is not None:
            self.taken = self.at_capture


@bug(
    "sglang #32555",
    "decode-mamba4x2-d64-bf16-p16-k0.33.0.4-shuffled-no_decay-k64w4s32.snap16-layers1from0-b5stale",
    "writes-own-state",
    execution="graph",
)
class TailOfTrackBuffer(SnapshotsParent):
    """A graph of decode takes the slots of copies from the end of a buffer that replays fill from its beginning on."""

    capabilities = SnapshotsParent.capabilities.with_changes(
        families={"mamba"}, eager={"decode"}, graph={"decode"}, max_topk=0, max_q_rows=1
    )
    in_graph = False

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.track = torch.zeros(max_bs, dtype=torch.int64, device=self.context.device)

    def init_forward_metadata(self, batch):
        self.in_graph = False
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.in_graph = True
        if batch.state.snapshot is not None:
            slots = batch.state.snapshot.slots
            self.track[: len(slots)].copy_(slots)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        if self.in_graph and self.rows is not None:
            self.copies = self.track[-batch.batch_size :]


@bug(
    "vllm #55178",
    "target-verify-gdn4x2-d64-bf16-p16-k5.1.30-chain6-shuffled-unit_keys-k64w4s32.slots-b4prod",
    "state-counts-tokens",
)
class PaddedTailIsAPrefill(SlotsParent):
    """The end of a prompt, padded to the rows of a verify, stores one state: that behind the padding."""

    def note(self, layer, token, window, state):
        after_prompt, live = self.taken == 0, self.live
        self.live = live & ~after_prompt
        super().note(layer, token, window, state)
        if token == self.most - 1:
            conv, temporal = self.pools(layer)
            self.live = live & after_prompt
            self.store(temporal, state, self.slot_of(0))
            self.store(conv[..., : window.shape[-1]], window, self.index)
        self.live = live


@bug(
    "sparkinfer #615", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "state-counts-tokens"
)
class DecodeReadsTransposed(StateParent):
    """A decode takes rows of a state for its columns, when it reads and when it stores."""

    capabilities = StateParent.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"}, max_topk=0)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.decodes = batch.forward_mode.is_decode()

    def pools(self, layer):
        conv, temporal = super().pools(layer)
        return conv, temporal.mT if self.decodes else temporal


@bug("lattice #262", "decode-mamba4x2-d64-bf16-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod", "state-counts-tokens")
class ValueHeadsOfKeyHeads(StateParent):
    """The loop goes over as many heads as there are key heads; outputs and states of the others stay as they were."""

    def token(self, rows, state, gates, layer):
        after, read = super().token(rows, state, gates, layer)
        head = torch.arange(layer.v_heads, device=after.device) < layer.k_heads
        after = torch.where(head[:, None, None], after, state)
        return after, torch.where(head[:, None], read, torch.zeros_like(read))


@bug(
    "vllm-xpu-kernels #544",
    "target-verify-gdn4x2-d64-bf16-p16-k5.1.30-chain6-shuffled-unit_keys-k64w4s32.slots-b4prod",
    "finite",
)
class WindowPerToken(SlotsParent):
    """Windows of a draft lie in a slot for each token, as its states do."""

    def before(self, layer):
        conv, _ = self.pools(layer)
        _, state = super().before(layer)
        slot = self.lists.gather(1, self.taken[:, None])[:, 0]
        return conv[slot][..., : layer.conv_width - 1], state

    def note(self, layer, token, window, state):
        conv, temporal = self.pools(layer)
        self.store(temporal, state, self.slot_of(token))
        self.store(conv[..., : window.shape[-1]], window, self.slot_of(token))


@bug(
    "vllm-ascend #15885",
    "target-verify-gdn4x2-d64-bf16-p16-k5.1.30-chain6-shuffled-unit_keys-k64w4s32.slots-b4prod",
    "state-counts-tokens",
)
class ConvolvesAsManyAsAccepted(SlotsParent):
    """As many of this step's tokens are convolved as were accepted of the step before; the rest is 0."""

    def continued(self, token, window, state):
        self.now = token
        return super().continued(token, window, state)

    def convolved(self, every, layer):
        found = super().convolved(every, layer)
        return torch.where((self.now <= self.taken)[:, None], found, 0.0)
