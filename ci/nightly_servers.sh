#!/usr/bin/env bash
# The attention backends of servers, each in an environment of its own: what ci/nightly.sh does for the kit's own adapters.
#
#   ci/nightly_servers.sh OUT [NIGHTS]
#
# Makes the environments of ci/servers.sh that are not there yet. Writes OUT/ENVIRONMENT/report.json, report.html and the rest
# of what ci/nightly.sh writes; NIGHTS/ENVIRONMENT keeps records of earlier nights. What is declared in packages/servers/tests/bridges/ beyond
# the bridges, because the server offers it and is wrong there, runs as well, with the known failures of ci/servers/. The
# environment public-kernels runs the adapters of tests/kernels/: Triton kernels of servers and of others, without a server.
# Goes through all of them, and fails with the first exit code that was not 0.
#
#   ATTN_SERVERS="a b"     instead of every environment of ci/servers/
#   ATTN_TIER=smoke        smoke, core or full; the known failures are those of smoke
#   ATTN_SHARDS=DIR        merge what several machines wrote, DIR/*/ENVIRONMENT/report.json, and run nothing
#   and what else ci/nightly.sh reads
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(realpath -m "${1:?usage: ci/nightly_servers.sh OUT [NIGHTS]}")" nights="${2:+$(realpath -m "$2")}"

declare -A backends=(
  [sglang-0.5.23]="sglang:triton sglang:triton_mla sglang:triton_draft sglang:flashinfer sglang:flashinfer_mla
    sglang:trtllm_mha sglang:torch_native sglang:trtllm_mla sglang:cutedsl_mla sglang:fa3 sglang:fa3_mla sglang:fa3_draft sglang:fa4 sglang:dsa sglang:dsa_fused sglang:gdn sglang:gdn_hybrid sglang:gdn_flashinfer sglang:kda sglang:kda_hybrid sglang:mamba2
    sglang:mamba2_hybrid sglang:lightning sglang:lightning_hybrid
    sglang:torch_native_pd sglang:triton_mla_pd sglang:gdn_hybrid_pd sglang:mamba2_hybrid_pd sglang:torch_native_hicache sglang:triton_mla_hicache
    sglang_wider:SoftCap
    sglang_wider:WindowsInVerify sglang_wider:SharedKV sglang_bugs:WindowsInDecode sglang_bugs:FP8"
  [sglang-0.5.12.post1]="sglang:triton"
  [vllm-0.33.0]="vllm:triton vllm:triton_2d vllm:triton_invariant vllm:triton_fp8 vllm:triton_per_token_head vllm:triton_mla vllm:flash_attn vllm:flash_attn_sinks vllm:flash_attn_fp8
    vllm:flash_attn_2 vllm:flashmla vllm:flashmla_fp8 vllm:flashmla_sparse
    vllm:flashinfer vllm:flex vllm:flex_merged vllm:xpu_mla_sparse vllm_index_metadata:Metadata vllm_wider:LseInFloat32
    vllm:triton_pd vllm:triton_mla_pd vllm_wider:SmallerBlocks
    vllm:gdn vllm:mamba2 vllm:bailing vllm:linear vllm:gdn_hybrid vllm:mamba2_hybrid"
  [public-kernels]="sglang_kernels:Decode sglang_kernels:DecodeMHA sglang_kernels:DecodeMLA sglang_kernels:DecodeMLARope32
    sglang_kernels:Extend vllm_kernels:Unified vllm_kernels:UnifiedFP8 vllm_kernels:UnifiedPerTokenHead vllm_kernels:UnifiedTF32
    vllm_kernels:ChunkedPrefillPagedDecode vllm_kernels:WithPaddedRequests vllm_kernels:Windowed vllm_kernels:PrefixPrefill
    vllm_kernels:DecodeMLA vllm_kernels:DecodeMLAOneHead vllm_kernels:GroupedDecode lightllm_kernels:GQADecode
    lightllm_kernels:FlashDecoding flag_gems_kernels:FlashMLA torch_kernels:SDPA torch_kernels:SDPAFloatMask
    sglang_kernels:SparseMLAPrefill sglang_kernels:SparseMLAPrefillUnion2 sglang_kernels:SparseMLAForward
    sglang_kernels:SparseMLAPacked
    vllm_kernels:SparseMLA vllm_compressor:CompressorOfDeepSeekV4 sglang_indexer:IndexerAmax sglang_indexer:IndexerPowersOfTwo
    sglang_dsv4:UnifiedDecode sglang_dsv4:UnifiedDecodeSplits sglang_dsv4:UnifiedPrefill sglang_states:DeltaRule fla_states:FLA"
)
declare -A known=(
  [sglang-0.5.23]=known_failures.toml
  [sglang-0.5.12.post1]=known_failures_older.toml
  [vllm-0.33.0]=known_failures_vllm.toml
  [public-kernels]=known_failures_kernels.toml
)
names=(${ATTN_SERVERS:-sglang-0.5.23 sglang-0.5.12.post1 vllm-0.33.0 public-kernels})

status=0
for name in "${names[@]}"; do
  [[ -n "${backends[$name]:-}" ]] || { echo "ci/nightly_servers.sh: there is no $name; there are ${!backends[*]}" >&2; exit 4; }
  if [[ -n "${ATTN_SHARDS:-}" ]]; then
    ATTN_SHARDS="$ATTN_SHARDS/*/$name/report.json" bash ci/nightly.sh "$out/$name" ${nights:+"$nights/$name"} ||
      { code=$?; [[ $status -ne 0 ]] || status=$code; }
    continue
  fi
  bash ci/servers.sh "$name"
  PYTHONPATH="$PWD/packages/servers/tests/bridges:$PWD/tests/kernels${PYTHONPATH:+:$PYTHONPATH}" ATTN_PYTHON="$PWD/build/servers/$name/bin/python" \
    ATTN_BACKENDS="${backends[$name]}" ATTN_KNOWN="ci/servers/${known[$name]}" ATTN_TIER="${ATTN_TIER:-smoke}" \
    bash ci/nightly.sh "$out/$name" ${nights:+"$nights/$name"} || { code=$?; [[ $status -ne 0 ]] || status=$code; }
done
exit "$status"
