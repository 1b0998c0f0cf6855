#!/usr/bin/env bash
# Makes this checkout ready to run: .venv with pinned versions. Quick when it already is.
#
#   PYTHON=python3.12     the interpreter that .venv is made with
#   ATTN_PYTHON=python3   no .venv: use this interpreter and the packages it has (an image with its own torch)
#   ATTN_SETUP=run        only what running the kit and its pytest plugin takes: the kit and cuda-on-cpu, no triton, no FlashInfer,
#                         no developers' tools. Else all four distributions
#   ATTN_EXTRAS=ray       further extras of the kit: Ray, whose tests are skipped without it, is 80 MB
#   ATTN_TORCH_INDEX=URL  take torch from this package index, such as torch's own of CPU builds: without CUDA's libraries
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -n "${ATTN_PYTHON:-}" ]]; then
  "$ATTN_PYTHON" -c '
import importlib.metadata as m
for name in ("attn-testkit", "cuda-on-cpu", "attn-testkit-corpus", "attn-testkit-servers"): m.version(name)
import attn_testkit.runner_modes' 2>/dev/null ||
    "$ATTN_PYTHON" -m pip install --quiet --no-deps --no-build-isolation \
      -e packages/cuda_on_cpu -e . -e packages/corpus -e packages/servers
  exit 0
fi

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "ci/setup.sh: $("$python" --version) is too old, attn-testkit needs 3.11; set PYTHON" >&2; exit 4; }

# The directory belongs to it: an environment that was copied or moved runs somebody else's code.
torch_index="${ATTN_TORCH_INDEX:-}"
wanted="$(pwd) $("$python" --version) $({ cat ci/constraints.txt ci/vendor.txt pyproject.toml packages/*/pyproject.toml attn_testkit/VERSION; echo "$torch_index${ATTN_EXTRAS:-}"; } | sha256sum)"
level="${ATTN_SETUP:-dev}"
ready="$(cat .venv/ready 2>/dev/null || true)"
[[ "$ready" == "$wanted" || "$ready" == "$wanted $level" ]] && exit 0

echo "ci/setup.sh: installing into .venv: about 1 GB with a CPU build of torch" >&2
if [[ ! -x .venv/bin/python ]] || ! head -n 1 .venv/ready 2>/dev/null | grep -qF "$(pwd) $("$python" --version) "; then
  "$python" -m venv --clear .venv
fi
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check install -c ci/constraints.txt)
"${pip[@]}" setuptools
# An index of torch's own need not have its dependencies: they come with the kit's, below.
"${pip[@]}" ${torch_index:+--no-deps --index-url "$torch_index"} torch
if [[ "$level" == run ]]; then
  "${pip[@]}" --no-build-isolation -e packages/cuda_on_cpu -e ".[xdist]"
  echo "$wanted run" > .venv/ready
  exit 0
fi
# torch's CUDA builds bring the one triton that they work with; its CPU builds bring none.
.venv/bin/python -c 'import importlib.metadata as m; m.version("triton")' 2>/dev/null || "${pip[@]}" 'triton<=3.9.0'
"${pip[@]}" --no-build-isolation -e packages/cuda_on_cpu -e ".[dev${ATTN_EXTRAS:+,$ATTN_EXTRAS}]" -e packages/corpus -e packages/servers
"${pip[@]}" --no-deps -r ci/vendor.txt
echo "$wanted" > .venv/ready
