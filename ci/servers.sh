#!/usr/bin/env bash
# Makes environments that have the kit and one server, for --backend sglang:NAME and vllm:NAME. Without a GPU, and quick when
# they are there.
#
#   ci/servers.sh                      every one of ci/servers/: build/servers/sglang-0.5.23, ...
#   ci/servers.sh vllm-0.33.0          that one
#   build/servers/sglang-0.5.23/bin/attn-testkit run --backend sglang:triton --device cpu
#
#   PYTHON=python3.12     the interpreter that they are made with
#   ATTN_TORCH_INDEX=URL  take torch from this package index: without a GPU one of CPU builds, such as torch's own
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
torch_index="${ATTN_TORCH_INDEX:-}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "ci/servers.sh: $("$python" --version) is too old, attn-testkit needs 3.11; set PYTHON" >&2; exit 4; }

names=("$@")
if [[ ${#names[@]} -eq 0 ]]; then
  for pins in ci/servers/*.txt; do names+=("$(basename "$pins" .txt)"); done
fi

for name in "${names[@]}"; do
  pins="ci/servers/$name.txt" env="build/servers/$name"
  [[ -f "$pins" ]] || { echo "ci/servers.sh: there is no $pins; there are: $(cd ci/servers && echo *.txt)" >&2; exit 4; }
  # An environment that was moved runs somebody else's code: its place belongs to what is wanted.
  wanted="$(pwd) $("$python" --version) $({ cat ci/constraints.txt ci/vendor.txt "$pins" pyproject.toml packages/*/pyproject.toml; echo "$torch_index"; } | sha256sum)"
  [[ -f "$env/ready" && "$(cat "$env/ready")" == "$wanted" ]] && continue
  echo "ci/servers.sh: installing into $env: 3 to 4 GB, some minutes" >&2
  "$python" -m venv --clear "$env"
  pip=("$env/bin/python" -m pip --quiet --disable-pip-version-check install)
  "${pip[@]}" -c ci/constraints.txt setuptools
  "${pip[@]}" -c ci/constraints.txt ${torch_index:+--no-deps --index-url "$torch_index"} torch
  "$env/bin/python" -c 'import importlib.metadata as m; m.version("triton")' 2> /dev/null ||
    "${pip[@]}" -c ci/constraints.txt 'triton<=3.9.0'
  "${pip[@]}" -c ci/constraints.txt --no-build-isolation -e packages/cuda_on_cpu -e '.[xdist]' -e packages/corpus -e packages/servers
  "${pip[@]}" --no-deps -r ci/vendor.txt
  # Without a GPU a server with a torch for CUDA imports kernels that come compiled.
  "$env/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None and not torch.cuda.is_available())' ||
    { echo "ci/servers.sh: no GPU is here, and torch is a build for CUDA; set ATTN_TORCH_INDEX to an index of CPU builds" >&2; exit 4; }
  # The server says that it needs a CUDA build of torch and kernels that nothing here can run: what it imports is pinned.
  "${pip[@]}" --no-deps -r "$pins"
  echo "$wanted" > "$env/ready"
done
