#!/usr/bin/env bash
# Sets everything up and runs style, wheels, types and all tests that take less than seconds, on a CPU. Further arguments go to
# pytest. `bash ci/pytest.sh -m slow` runs the other tests (tests/slow_tests.py).
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
tested=0
bash ci/pytest.sh -m "not slow" "$@" || tested=$?

echo "== types"
typed=0
wait "$types" || typed=$?
cat "$built/types"
exit $((tested ? tested : typed))
