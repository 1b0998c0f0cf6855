#!/usr/bin/env bash
# Builds the documentation as a site into site/; any warning of mkdocs fails, a broken link among them. Needs neither torch
# nor the kit: what it needs is the `docs` extra of pyproject.toml, in an environment of its own under build/.
# Further arguments go to `mkdocs build`. To read while writing: build/docs/bin/mkdocs serve
#
#   PYTHON=python3.12     the interpreter that the environment is made with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"

wanted="$("$python" --version) $(cat ci/constraints.txt pyproject.toml | sha256sum)"
if [[ ! -f build/docs/ready || "$(cat build/docs/ready)" != "$wanted" ]]; then
  echo "ci/docs.sh: installing into build/docs" >&2
  "$python" -m venv --clear build/docs
  "$python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > build/docs/extra.txt
  build/docs/bin/python -m pip --quiet --disable-pip-version-check install -c ci/constraints.txt -r build/docs/extra.txt
  echo "$wanted" > build/docs/ready
fi
# Material's own page about the future of mkdocs: no remark on these pages.
export NO_MKDOCS_2_WARNING=1
build/docs/bin/mkdocs build --strict "$@" # and not --quiet: it counts what it prints
echo "ci/docs.sh: site/index.html; search needs a server: $python -m http.server -d site, then http://localhost:8000"
