#!/usr/bin/env bash
# One smoke of a server's own backend, unchanged, on a CPU: what a pull request asks of the bridges. The nightly runs the rest
# (ci/nightly_servers.sh, and packages/servers/tests/bridges in the same environments).
#
#   ci/pr_servers.sh NAME    an environment of ci/servers/: sglang-0.5.23, vllm-0.33.0
#
# Exit code 4, with a line that says so: the environment could not be made, so nothing was tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name="${1:?usage: ci/pr_servers.sh NAME}"
# A quick backend of each; SGLang's runs in eager only.
declare -A backends=([sglang-0.5.23]=sglang:torch_native [vllm-0.33.0]=vllm:triton_mla)
backend="${backends[$name]:-}"
[[ -n "$backend" ]] || { echo "ci/pr_servers.sh: there is no $name; there are: ${!backends[*]}" >&2; exit 4; }
bash ci/servers.sh "$name" || {
  echo "ci/pr_servers.sh: the environment of $name could not be made: NOTHING of $backend was tested. It needs a network" >&2
  exit 4
}
"build/servers/$name/bin/attn-testkit" run --backend "$backend" --tier smoke --device cpu --jobs 2
