#!/usr/bin/env bash
# Sets up what running the kit takes, and shows what it does: `attn-testkit demo`. No GPU, no account. Arguments are those of
# attn-testkit: ci/try.sh run --backend torch_native --device cpu
export ATTN_SETUP=run
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ $# -gt 0 ]] || set -- demo
exec "$python" -m attn_testkit "$@"
