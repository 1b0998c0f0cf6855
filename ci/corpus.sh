#!/usr/bin/env bash
# The corpus of public Triton kernels: every launch in the emulation and in the stock interpreter. Without a GPU; hours on one core.
#
#   ci/corpus.sh OUT [PAGE]     OUT/PROJECT.jsonl, a line a call; the full table into PAGE, else printed
#
# Kernels that ask for block pointers run with Triton 3.6.0 as well, in a copy of their environment. Fails where a kernel leaves
# different bits, or where the emulation raises and the stock interpreter does not. Goes on where an earlier run stopped.
#
#   TRITON_TUTORIALS=FOLDER     python/tutorials of a checkout of Triton, which no package has: its tutorials as well
#   ATTN_CORPUS="fla vllm"      instead of every project
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(realpath -m "${1:?usage: ci/corpus.sh OUT [PAGE]}")"
older=3.6.0
mkdir -p "$out"
declare -A environments=([fla]=kernels [flag_gems]=kernels [sglang]=sglang-0.5.23 [vllm]=vllm-0.33.0 [tutorials]=kernels)
projects=(${ATTN_CORPUS:-fla flag_gems sglang vllm ${TRITON_TUTORIALS:+tutorials}})

# What some modules of vLLM with kernels import, and no attention backend does.
more=(torchvision==0.28.0 compressed-tensors==0.20.0 loguru==0.7.3)
run() { OMP_NUM_THREADS=1 "$1/bin/python" -W ignore tests/kernels/corpus/corpus.py "${@:2}"; }

for project in "${projects[@]}"; do
  name="${environments[$project]}"
  bash ci/servers.sh "$name"
  for triton in "" "$older"; do
    env="build/corpus/$name${triton:+-triton-$triton}"
    [[ -d "$env" ]] && continue
    mkdir -p build/corpus
    cp -a "build/servers/$name" "$env"
    pip=("$env/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps)
    [[ "$project" != vllm ]] || "${pip[@]}" "${more[@]}"
    [[ -z "$triton" ]] || "${pip[@]}" "triton==$triton"
  done
  env="build/corpus/$name"
  run "$env" kernels "$project" "$out/$project.kernels.json"
  [[ ! -f "tests/kernels/corpus/corpus_calls_$project.py" ]] || run "$env" calls "$project" "$out/$project.jsonl"
  run "$env" generated "$project" "$out/$project.jsonl"
  run "$env-triton-$older" generated "$project" "$out/${project}_$older.jsonl" "after=$out/$project.jsonl"
done
"build/corpus/${environments[${projects[0]}]}/bin/python" tests/kernels/corpus/corpus_table.py "$out" ${2:+"$2"}
