#!/usr/bin/env bash
# Sets everything up and judges the triton backend in all modes, eager and graph, without a GPU.
# Further arguments go to `attn-testkit run`: ci/try.sh --mode decode --html out.html
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$python" -m attn_testkit run --backend triton --tier smoke --device cpu "$@"
