"""vLLM 0.33.0's NIXL worker pairs the wrong blocks if the sender's are smaller and a prefix is cached.

A prompt of 22 tokens, blocks of 16 tokens at the receiver and of 4 at the sender. The first block is in the receiver's
prefix cache, so tokens 16 to 21 are read. No check of the kit is used. Ends with code 1 if a token is read from the
place of another.
"""

import sys

from attn_testkit_servers.bridges.vllm import backend_class
from cuda_on_cpu import emulated_cuda

with emulated_cuda():
    backend_class("triton_pd")  # prepares the process for vLLM's imports

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec

PROMPT, OURS, THEIRS, CACHED = 22, 16, 4, 16
worker = object.__new__(NixlPullConnectorWorker)
worker._has_mamba, worker._group_spec_types = False, (FullAttentionSpec,)
worker.shutdown = lambda: None
ours = [list(range(CACHED // OURS, -(-PROMPT // OURS)))]  # block i has the tokens from OURS * i on
theirs = [list(range(-(-PROMPT // THEIRS)))]
ours, theirs = worker._map_block_ids_for_block_size_ratio(ours, theirs, OURS // THEIRS)
ours, theirs = worker._apply_prefix_caching(ours, theirs, 1, 1)
wrong = False
for here, there in zip(ours[0], theirs[0], strict=True):
    needed = here * THEIRS < PROMPT
    wrong |= needed and here != there
    print(f"tokens from {here * THEIRS} on get tokens from {there * THEIRS} on")
print("WRONG: a token is read from the place of another" if wrong else "right")
sys.exit(int(wrong))
