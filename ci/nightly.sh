#!/usr/bin/env bash
# Judges every backend that this machine can run, with real graphs where it has a GPU.
#
#   ci/nightly.sh OUT [NIGHTS | PREVIOUS.json]
#
# NIGHTS is a folder of the records of earlier nights, made if it is not there: the page shows what changed since the last
# one that finished, trends, and since when each failure is red (docs/how-to/nightly.md). Tonight's record is put beside them.
#
# Writes OUT/report.json, junit.xml, report.html, summary.md and, with an earlier night, compare.txt; with an audit
# also audit.json, audit.html and audit.txt; with ATTN_SINCE since.txt. What an earlier night left under these names is removed first.
# Fails when a backend is not conformant or cannot be imported any more, when nothing ran, when something newly fails or
# vanished since the night before, or when the audit fails. Page and summary are red when a backend fails or nothing ran.
# With an earlier night the exit code tells what changed: 8 where tests fail and each of them failed the night before too.
# compare.txt ends with what changed since the last night of NIGHTS that was green.
#
# Several machines: each runs a part (ATTN_SHARD=K/N, without NIGHTS), and one that has their records runs this script with
# ATTN_SHARDS: it merges them instead of running, and does all the rest.
#
#   ATTN_SHARD=K/N         run part K of N
#   ATTN_SHARDS="GLOB ..." records of all shards, such as shards/*/report.json: merge them, run nothing
#   ATTN_NIGHTS=60         records that stay in NIGHTS; of those that this script put there the oldest are removed
#   ATTN_TIER=full         smoke, core or full
#   ATTN_BACKENDS="a b"    instead of every registered backend
#   ATTN_DEVICE=auto       auto, cuda, cpu
#   ATTN_WORKERS=auto      a worker for each GPU, or for each core without one
#   ATTN_TIMEOUT=600       seconds that one case-run may take
#   ATTN_KNOWN=FILE        known failures
#   ATTN_AUDIT=1           also judge the kit by its catalogue of faults, on the same device
#   ATTN_AUDIT_JOBS=N      processes of the audit, instead of as many as fit
#   ATTN_SINCE="a b"       also measure what `run --since` misses, over mutants of these backends and a sample of the faults
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out="$(realpath -m "${1:?usage: ci/nightly.sh OUT [NIGHTS | PREVIOUS.json]}")"
mkdir -p "$out"

kept="$(mktemp -d)"
trap 'rm -rf "$kept"' EXIT
before=() nights=""
if [[ "${2:-}" == *.json ]]; then
  # It may be last night's, in OUT.
  [[ ! -f "$2" ]] || { cp "$2" "$kept/previous.json" && before=(--previous "$kept/previous.json"); }
elif [[ -n "${2:-}" ]]; then
  nights="$(realpath -m "$2")" && mkdir -p "$nights"
  before=(--history "$nights")
fi
(cd "$out" && rm -f report.{json,html} junit.xml summary.md compare.txt since.txt audit.{json,html,txt})

status=0
worse() { [[ $status -ne 0 ]] || status=$1; }

# A page and a summary for a night without a record: red, with the reason.
red() {
  echo "ci/nightly.sh: $1" >&2
  printf '### ❌ NOTHING RAN: %s\n' "$1" > "$out/summary.md"
  printf '<!doctype html><meta charset="utf-8"><title>✗ nothing ran · attn-testkit</title>\n' > "$out/report.html"
  printf '<h1 style="color: #b00020">NOTHING RAN</h1><p>%s</p>\n' "$1" >> "$out/report.html"
}

page() {
  "$python" -m attn_testkit results report "$out/report.json" --html "$out/report.html" --markdown "$@" > "$out/summary.md"
}

# Tonight's record goes to the others; names sort by time.
keep() {
  cp "$out/report.json" "$nights/night-$(date -u +%Y%m%dT%H%M%SZ).json"
  local names=("$nights"/night-*.json) most="${ATTN_NIGHTS:-60}"
  [[ ${#names[@]} -le $most ]] || rm -- "${names[@]:0:${#names[@]}-most}"
}

# Page, comparison and what is kept, of tonight's record.
finish() {
  # An earlier record that cannot be read costs what it would have told, and not the page.
  page "${before[@]}" || { worse $?; page; } ||
    { code=$?; red "the record cannot be read; see report.json"; worse $code; }
  # A record that lacks results, as where the disk was full, is no green.
  grep -q '"finished": true' "$out/report.json" || worse 1
  if [[ ${#before[@]} -gt 0 ]]; then
    local changed=0
    "$python" -m attn_testkit results compare "${before[1]}" "$out/report.json" | tee "$out/compare.txt" || changed=$?
    # Tests fail, as pytest's exit code says, and each of them did the night before.
    [[ $status -ne 1 || $changed -ne 0 || ! -s "$out/compare.txt" ]] || status=8
    worse $changed
    [[ -s "$out/compare.txt" ]] || rm "$out/compare.txt"
    if [[ -n "$nights" && -f "$out/compare.txt" ]]; then
      # Not a reason to fail of its own: what is red since then is red tonight.
      echo "== since the last green night" | tee -a "$out/compare.txt"
      "$python" -m attn_testkit results compare --good "$nights" "$out/report.json" 2>&1 | tee -a "$out/compare.txt" || true
    fi
  fi
  [[ -z "$nights" ]] || keep
}

if [[ -n "${ATTN_SHARDS:-}" ]]; then
  # Globs, left unquoted on purpose.
  # shellcheck disable=SC2086
  "$python" -m attn_testkit results merge $ATTN_SHARDS --json "$out/report.json" 2> "$kept/merge.txt" || worse $?
  cat "$kept/merge.txt" >&2
  if [[ -f "$out/report.json" ]]; then finish; else red "no verdict: $(tail -n 1 "$kept/merge.txt")"; fi
  backends=""
elif [[ -n "${ATTN_BACKENDS:-}" ]]; then
  backends="$(tr -s ' ,' '\n' <<< "$ATTN_BACKENDS" | sed '/^$/d')"
else
  # One that cannot be imported any more stays in: it is a failing row.
  backends="$("$python" -m attn_testkit list --json |
    "$python" -c 'import json, sys; print("\n".join(b["name"] for b in json.load(sys.stdin)))')" || backends=""
fi

if [[ -n "${ATTN_SHARDS:-}" ]]; then
  : # merged
elif [[ -z "$backends" ]]; then
  red "no backend is registered, or attn-testkit list failed"
  worse 5
else
  mapfile -t backends <<< "$backends"
  options=(--attn-tier="${ATTN_TIER:-full}" --attn-device="${ATTN_DEVICE:-auto}" --attn-timeout="${ATTN_TIMEOUT:-600}")
  options+=(--attn-keep-unloadable "${backends[@]/#/--attn-backend=}")
  [[ -z "${ATTN_SHARD:-}" ]] || options+=(--attn-shard="$ATTN_SHARD")
  [[ -z "${ATTN_KNOWN:-}" ]] || options+=(--attn-known-failures="$(realpath "$ATTN_KNOWN")")
  # From the output directory, so that nothing of the checkout's own configuration or conftest is in play. A backend in
  # the caller's directory is found all the same.
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  (cd "$out" && "$python" -m pytest --pyargs attn_testkit.suite -q -p no:cacheprovider \
    -n "${ATTN_WORKERS:-auto}" --max-worker-restart=1000 --attn-report=report.json --junitxml=junit.xml \
    "${options[@]}") || worse $?
  if [[ ! -f "$out/report.json" ]]; then
    red "pytest ended with exit code $status before it had a record; see its output"
    worse 5
  else
    finish
  fi
fi
[[ -z "${GITHUB_STEP_SUMMARY:-}" ]] || cat "$out/summary.md" >> "$GITHUB_STEP_SUMMARY"

if [[ -n "${ATTN_AUDIT:-}" ]]; then
  "$python" -m attn_testkit audit --device "${ATTN_DEVICE:-auto}" ${ATTN_AUDIT_JOBS:+--jobs "$ATTN_AUDIT_JOBS"} \
    --json "$out/audit.json" --html "$out/audit.html" | tee "$out/audit.txt" || worse $?
fi
if [[ -n "${ATTN_SINCE:-}" ]]; then
  # shellcheck disable=SC2086
  "$python" ci/since_misses.py $(printf -- "-b %s " $ATTN_SINCE) --faults 40 --device "${ATTN_DEVICE:-auto}" --at-most 40 |
    tee "$out/since.txt" || worse $?
fi
exit "$status"
