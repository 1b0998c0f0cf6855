import torch

from attn_testkit.contract import AttentionBackend, Capabilities


class MyDecode(AttentionBackend):
    capabilities = Capabilities(
        eager={"decode"},
        graph={"decode"},
        heads={"families": {"gqa"}, "gqa_ratios": {2, 8}, "head_dims": {64}},
        precision={"dtypes": {"fp16"}},
        kv_pool={"page_sizes": {16}},
        bounds={"max_context_len": 4096},
        needs={"cpu_seq_lens": False},
    )

    def __init__(self, context):
        super().__init__(context)
        size = context.max_bs * context.layers[0].tp_q_head_num * context.max_context_len
        self.workspace = torch.empty(size, device=context.device)

    def init_forward_metadata(self, batch):
        self.slots = self.context.req_to_token[batch.req_pool_indices].long()
        self.lens = batch.seq_lens

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        context = self.context
        self.graph_slots = torch.zeros(max_bs, context.max_context_len, dtype=torch.int64, device=context.device)
        self.graph_lens = torch.ones(max_bs, dtype=torch.int64, device=context.device)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        bs = batch.batch_size
        self.slots, self.lens = self.graph_slots[:bs], self.graph_lens[:bs]
        self.slots.copy_(self.context.req_to_token[batch.req_pool_indices])
        self.lens.copy_(batch.seq_lens)

    def in_workspace(self, logits):
        return self.workspace[: logits.numel()].view(logits.shape).copy_(logits)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        keys, values = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        keys, values = keys[self.slots].float(), values[self.slots].float()
        seen = torch.arange(keys.shape[1], device=q.device) < self.lens[:, None]
        values = values.masked_fill(~seen[:, :, None, None], 0.0)
        heads = q.view(len(q), layer.tp_k_head_num, -1, layer.head_dim).float()
        logits = torch.einsum("bhgd,bshd->bhgs", heads, keys) * layer.scaling
        logits = self.in_workspace(logits)
        weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        out = torch.einsum("bhgs,bshd->bhgd", weights, values)
        return out.reshape(q.shape).to(q.dtype)
