#!/usr/bin/env bash
# Gets a Chromium for the tests that look at pages (tests/front_ends/test_page_in_browser.py); without one they are
# skipped. Changes nothing but a container, which is thrown away afterwards, and never fails.
#
#   ATTN_BROWSER=PATH     the browser to use, instead of the first on the path
set -uo pipefail
for name in "${ATTN_BROWSER:-}" chromium chromium-browser google-chrome google-chrome-stable chrome-headless-shell; do
  command -v "$name" > /dev/null && exit 0
done
# shellcheck disable=SC1091 # of the machine
# Debian has it as a package; Ubuntu's of that name wants snap, which no container has.
[[ ( -f /.dockerenv || -f /run/.containerenv ) && $EUID -eq 0 && "$(. /etc/os-release && echo "$ID")" == debian ]] || exit 0
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=60)
# Only what waits for a network is given up: an installation that is cut short leaves a mess.
timeout 60 apt-get update -qq && timeout 120 "${install[@]}" --download-only chromium && "${install[@]}" chromium ||
  echo "ci/browser.sh: no browser could be installed; tests that look at pages in one will be skipped" >&2
exit 0
