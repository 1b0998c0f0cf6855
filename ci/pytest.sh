#!/usr/bin/env bash
# Sets everything up and runs tests, a process per core: ci/pytest.sh OPTIONS_OF_PYTEST. `-m "not slow"`, the tests of ci/pr.sh, and
# `-m slow` are all there are (tests/slow_tests.py).
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

# A worker per core, up to four: more threads inside each only get in each other's way.
cores="$(env -u OMP_NUM_THREADS nproc)" # which it would believe
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tests start hundreds of processes. Each compiles the kit again where nobody may keep bytecode, and pytest rewrites every test
# file for each worker. It is kept beside the files: with PYTHONPYCACHEPREFIX torch would be compiled again, whose bytecode pip made.
unset PYTHONDONTWRITEBYTECODE
# Slow tests start first (tests/session_of_tests.py), and a worker that is through takes over what another has not begun.
exec "$python" -m pytest -n "${ATTN_WORKERS:-$((cores < 4 ? cores : 4))}" --dist worksteal "$@"
