#!/usr/bin/env bash
# Sets everything up and runs what a pull request must pass, on a CPU. Further arguments go to pytest: `-m "not slow"` leaves
# out what takes seconds (tests/slow_tests.py).
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

# Beside what comes first, which waits for nobody.
bash ci/browser.sh > /dev/null &
browser=$!

echo "== style"
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" ci/vocabulary.py --check

echo "== wheels: complete, working alone, and typed as they ship"
built="$(mktemp -d)"
trap 'rm -rf "$built"' EXIT
bash ci/wheels.sh "$built"
# Fills the time in which a test waits for a process; what it says comes after them.
(cd "$built/unpacked" &&
  nice "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p attn_testkit \
    -p cuda_on_cpu -p attn_testkit_corpus -p attn_testkit_servers) > "$built/types" 2>&1 &
types=$!

echo "== tests"
wait "$browser"
# A worker per core, up to four: more threads inside each only get in each other's way.
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tests start hundreds of processes. Each compiles the kit again where nobody may keep bytecode, and pytest rewrites every test
# file for each worker. It is kept beside the files: with PYTHONPYCACHEPREFIX torch would be compiled again, whose bytecode pip made.
unset PYTHONDONTWRITEBYTECODE
# Slow tests start first (conftest.py), and a worker that is through takes over what another has not begun.
tested=0
"$python" -m pytest -n "${ATTN_WORKERS:-$((cores < 4 ? cores : 4))}" --dist worksteal "$@" || tested=$?

echo "== types"
typed=0
wait "$types" || typed=$?
cat "$built/types"
exit $((tested ? tested : typed))
