#!/usr/bin/env bash
# Builds the documentation as a site into site/; any warning of mkdocs fails, a broken link among them. ci/reference.py, which
# needs the kit, writes the pages that come from the code into build/pages. mkdocs has an environment of its own, build/docs,
# with the `docs` extra of pyproject.toml. Further arguments go to `mkdocs build`. To read while writing: build/docs/bin/mkdocs serve
export ATTN_SETUP="${ATTN_SETUP:-run}"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"
"$python" ci/reference.py build/pages

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
