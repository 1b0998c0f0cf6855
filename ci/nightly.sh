#!/usr/bin/env bash
# Judges every backend that this machine can run, with real graphs where it has a GPU.
#
#   ci/nightly.sh OUT [PREVIOUS.json]
#
# Writes OUT/report.json, junit.xml, report.html, summary.md and, with a previous report, compare.txt; with an audit
# also audit.json, audit.html and audit.txt. Fails when a backend is not conformant, when something newly fails or
# vanished since PREVIOUS, or when the audit fails.
#
#   ATTN_TIER=full         smoke, core or full
#   ATTN_BACKENDS="a b"    instead of every registered backend
#   ATTN_DEVICE=auto       auto, cuda, cpu
#   ATTN_WORKERS=auto      a worker for each GPU, or for each core without one
#   ATTN_TIMEOUT=600       seconds that one case-run may take
#   ATTN_KNOWN=FILE        known failures
#   ATTN_AUDIT=1           also judge the kit by its catalogue of faults, on the same device
#   ATTN_AUDIT_JOBS=N      processes of the audit, instead of as many as fit
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out="$(realpath -m "${1:?usage: ci/nightly.sh OUT [PREVIOUS.json]}")"
previous="${2:-}"
mkdir -p "$out"

mapfile -t backends < <(
  if [[ -n "${ATTN_BACKENDS:-}" ]]; then
    tr -s ' ,' '\n' <<< "$ATTN_BACKENDS"
  else
    "$python" -m attn_testkit list --json |
      "$python" -c 'import json, sys; print("\n".join(b["name"] for b in json.load(sys.stdin) if not b["failure"]))'
  fi
)
[[ ${#backends[@]} -gt 0 && -n "${backends[0]}" ]] || { echo "ci/nightly.sh: no backend can be loaded" >&2; exit 5; }

options=(--attn-tier="${ATTN_TIER:-full}" --attn-device="${ATTN_DEVICE:-auto}" --attn-timeout="${ATTN_TIMEOUT:-600}")
options+=("${backends[@]/#/--attn-backend=}")
[[ -z "${ATTN_KNOWN:-}" ]] || options+=(--attn-known-failures="$(realpath "$ATTN_KNOWN")")

status=0
# From the output directory, so that nothing of the checkout's own configuration or conftest is in play. A backend in the
# caller's directory is found all the same.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
(cd "$out" && "$python" -m pytest --pyargs attn_testkit.suite -q -n "${ATTN_WORKERS:-auto}" --max-worker-restart=1000 \
  --attn-report=report.json --junitxml=junit.xml "${options[@]}") || status=$?

if [[ -f "$out/report.json" ]]; then
  "$python" -m attn_testkit report "$out/report.json" --html "$out/report.html" --markdown > "$out/summary.md"
  [[ -z "${GITHUB_STEP_SUMMARY:-}" ]] || cat "$out/summary.md" >> "$GITHUB_STEP_SUMMARY"
  if [[ -n "$previous" && -f "$previous" ]]; then
    "$python" -m attn_testkit compare "$previous" "$out/report.json" | tee "$out/compare.txt" ||
      { worse=$?; [[ $status -ne 0 ]] || status=$worse; }
  fi
fi

if [[ -n "${ATTN_AUDIT:-}" ]]; then
  "$python" -m attn_testkit audit --device "${ATTN_DEVICE:-auto}" ${ATTN_AUDIT_JOBS:+--jobs "$ATTN_AUDIT_JOBS"} \
    --json "$out/audit.json" --html "$out/audit.html" | tee "$out/audit.txt" ||
    { worse=$?; [[ $status -ne 0 ]] || status=$worse; }
fi
exit "$status"
