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

echo "== wheel: complete, and typed as it ships"
# setuptools puts what an earlier build left there into the wheel, modules that have moved too.
rm -rf build/lib build/bdist.*
built="$(mktemp -d)"
trap 'rm -rf "$built"' EXIT
"$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir "$built" .
"$python" -m zipfile -e "$built"/*.whl "$built/unpacked"
diff \
  <(find attn_testkit runner_modes -type f ! -name '*.pyc' ! -name README.md | sed 's|^runner_modes/|attn_testkit/runner_modes/|' | sort) \
  <(cd "$built/unpacked" && find attn_testkit -type f | sort) ||
  { echo "ci/pr.sh: the wheel lacks the files marked <; see [tool.setuptools] in pyproject.toml" >&2; exit 1; }
# Fills the time in which a test waits for a process; what it says comes after them.
(cd "$built/unpacked" &&
  nice "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p attn_testkit) > "$built/types" 2>&1 &
types=$!

echo "== tests"
wait "$browser"
# A worker per core, up to four: more threads inside each only get in each other's way.
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tests start hundreds of processes. Each compiles the kit again where nobody may keep bytecode, and pytest rewrites every test
# file for each worker. It is kept beside the files: with PYTHONPYCACHEPREFIX torch would be compiled again, whose bytecode pip made.
unset PYTHONDONTWRITEBYTECODE
# Slow tests start first (tests/conftest.py), and a worker that is through takes over what another has not begun.
tested=0
"$python" -m pytest -n "${ATTN_WORKERS:-$((cores < 4 ? cores : 4))}" --dist worksteal "$@" || tested=$?

echo "== types"
typed=0
wait "$types" || typed=$?
cat "$built/types"
exit $((tested ? tested : typed))
