# shellcheck shell=bash disable=SC2034
# Sourced by the other scripts: sets up, and names the checkout and its interpreter. Stays in the caller's directory.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/ci/setup.sh"
python="${ATTN_PYTHON:-$root/.venv/bin/python}"
