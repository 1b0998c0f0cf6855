#!/usr/bin/env bash
# Builds wheel and sdist of the four distributions, checks what is in them, and tries them in clean environments: ci/release.sh [OUT]
#
#   ATTN_PYTHONS="python3.11 python3.13"  interpreters to try; default: each supported one on PATH or of pyenv
#   ATTN_TORCH_INDEX=URL                  where torch's CPU builds are, beside pip's own sources
#   ATTN_TORCH="torch==2.13.0"            the torch to install; default: the CPU build of ci/constraints.txt's version. One
#                                         that brings CUDA's libraries takes 5 GB for each Python, one after the other
#
# Uploads nothing. Ends with what it could not try; exit code 1 if anything that it tried is wrong.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="$(realpath -m "${1:-$root/dist}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PIP_DISABLE_PIP_VERSION_CHECK=1 CUDA_VISIBLE_DEVICES=""
most_kilobytes=2048
minor_versions=(3.11 3.12 3.13 3.14)
torch="${ATTN_TORCH:-$(grep '^torch==' "$root/ci/constraints.txt")+cpu}"
not_covered=()
tried=()

fail() { echo "ci/release.sh: $*" >&2; exit 1; }

pythons() { # the path of each interpreter to try
  if [[ -n "${ATTN_PYTHONS:-}" ]]; then
    for name in $ATTN_PYTHONS; do command -v "$name" || fail "there is no $name"; done
    return
  fi
  local version candidate
  for version in "${minor_versions[@]}"; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
      if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
        command -v "$candidate"
        break
      fi
    done
  done
}

grep -v '^torch==' "$root/ci/constraints.txt" > "$work/constraints.txt"
constraints=(-c "$work/constraints.txt" --find-links "$work/dist") # the others of the four are on no index
mapfile -t found < <(pythons)
((${#found[@]})) || fail "no Python of ${minor_versions[*]} is here"
here=" $(for python in "${found[@]}"; do "$python" -c "import sys; print('%d.%d' % sys.version_info[:2], end=' ')"; done)"
for version in "${minor_versions[@]}"; do
  [[ -n "${ATTN_PYTHONS:-}" || "$here" == *" $version "* ]] || not_covered+=("Python $version: it is not here")
done

echo "== build"
"${found[0]}" -m venv "$work/tools"
"$work/tools/bin/pip" --quiet install -r "$root/ci/release.txt"
# From a clean copy of what is committed: nothing that lies about gets in.
git -C "$root" diff --quiet HEAD || echo "ci/release.sh: uncommitted changes are not part of the release" >&2
mkdir "$work/tree"
git -C "$root" archive HEAD | tar -x -C "$work/tree"
folders=(. packages/cuda_on_cpu packages/corpus packages/servers)
for folder in "${folders[@]}"; do
  (cd "$work/tree" && "$work/tools/bin/python" -m build --no-isolation --outdir "$work/dist" "$folder" > "$work/build.log" 2>&1) ||
    { tail -n 20 "$work/build.log" >&2; fail "the build of $folder failed"; }
done
wheel="$(ls "$work"/dist/attn_testkit-*.whl)" sdist="$(ls "$work"/dist/attn_testkit-*.tar.gz)"
ls -l "$work/dist"

echo "== contents, licence, metadata, size"
"$work/tools/bin/twine" --no-color check --strict "$work"/dist/*
"$work/tools/bin/python" "$root/ci/release_contents.py" "$work/tree" "$work/dist" "$most_kilobytes"

smoke() { # environment, description, arguments of `run`
  local bin="$1/bin" what="$2"
  shift 2
  (cd "$work" && "$bin/attn-testkit" run --mode decode --device cpu "$@" > "$work/smoke.log" 2>&1) ||
    { tail -n 30 "$work/smoke.log" >&2; fail "$what: smoke of decode does not pass"; }
  echo "  $what: $(tail -n 1 "$work/smoke.log")"
  tried+=("$what")
}

for python in "${found[@]}"; do
  name="Python $("$python" -c 'import platform; print(platform.python_version())')"
  echo "== $name"
  environment="$work/${name// /-}"
  "$python" -m venv "$environment"
  pip=("$environment/bin/pip" --quiet install)
  # Alone first, so that a CUDA build of gigabytes is not taken where a CPU build is not to be had.
  if ! "${pip[@]}" --no-deps ${ATTN_TORCH_INDEX:+--extra-index-url "$ATTN_TORCH_INDEX"} "$torch" 2> "$work/pip.log"; then
    not_covered+=("$name: no $torch for it; set ATTN_TORCH_INDEX or ATTN_TORCH")
    continue
  fi
  if ! "${pip[@]}" "${constraints[@]}" "$wheel" 2> "$work/pip.log"; then
    not_covered+=("$name: its dependencies cannot be installed: $(tail -n 1 "$work/pip.log")")
    continue
  fi
  # A build of torch with CUDA's libraries brings it.
  "$environment/bin/pip" --quiet uninstall --yes triton 2> /dev/null
  "$environment/bin/attn-testkit" --version
  (cd "$work" && "$environment/bin/attn-testkit" doctor --device cpu > "$work/smoke.log" 2>&1) ||
    { tail -n 30 "$work/smoke.log" >&2; fail "$name, doctor: the kit cannot run"; }
  smoke "$environment" "$name, no extras" --backend torch_native
  "$environment/bin/pip" --quiet uninstall --yes attn-testkit
  "${pip[@]}" --no-deps "$sdist" 2> "$work/pip.log" || { cat "$work/pip.log" >&2; fail "$name: the sdist cannot be installed"; }
  smoke "$environment" "$name, from the sdist" --backend torch_native --execution eager
  if "${pip[@]}" "${constraints[@]}" "$wheel[audit,servers]" 2> "$work/pip.log"; then
    (cd "$work" && "$environment/bin/attn-testkit" audit --device cpu --fault qlens-packed-vs-uniform-stride \
      > "$work/smoke.log" 2>&1) || { tail -n 30 "$work/smoke.log" >&2; fail "$name, extra audit: a seeded bug is not caught"; }
    "$environment/bin/attn-testkit" record --help > /dev/null || fail "$name, extra servers: there is no record"
    tried+=("$name, extras audit and servers")
  else
    not_covered+=("$name, extras audit and servers: $(tail -n 1 "$work/pip.log")")
  fi
  if "${pip[@]}" "${constraints[@]}" "$wheel[xdist,fuzz]" 2> "$work/pip.log"; then
    printf '[pytest]\n' > "$work/pytest.ini"
    (cd "$work" && "$environment/bin/python" -m pytest -q -n 1 --pyargs attn_testkit.suite --attn-backend=torch_native \
      --attn-mode=decode --attn-execution=eager --attn-device=cpu > "$work/smoke.log" 2>&1) ||
      { tail -n 30 "$work/smoke.log" >&2; fail "$name, extra xdist: the suite does not pass"; }
    tried+=("$name, extra xdist")
    (cd "$work" && "$environment/bin/attn-testkit" fuzz --backend torch_native --device cpu --mode decode --minutes 5 \
      --runs 5 > "$work/smoke.log" 2>&1) || { tail -n 30 "$work/smoke.log" >&2; fail "$name, extra fuzz: it does not pass"; }
    tried+=("$name, extra fuzz")
  else
    not_covered+=("$name, extras xdist and fuzz: $(tail -n 1 "$work/pip.log")")
  fi
  for extra in triton flashinfer tokenspeed; do
    packages=("$wheel[$extra]")
    # Its own dependencies are CUDA's libraries; these are what it imports.
    [[ "$extra" == flashinfer ]] && packages=(--no-deps -r "$root/ci/vendor.txt")
    [[ "$extra" == triton ]] && packages+=("triton<=3.9.0")
    if [[ "$extra" == tokenspeed ]]; then
      not_covered+=("$name, extra tokenspeed: it brings CUDA's libraries, and its kernels run on SM100 alone")
    elif "${pip[@]}" "${constraints[@]}" "${packages[@]}" 2> "$work/pip.log"; then
      smoke "$environment" "$name, extra $extra" --backend "$extra" --execution eager
    else
      not_covered+=("$name, extra $extra: $(grep -m 1 ERROR "$work/pip.log" || tail -n 1 "$work/pip.log")")
    fi
  done
  rm -rf "$environment"
done

mkdir -p "$out"
cp "$work"/dist/* "$out/"
echo "== built into $out"
printf 'tried      %s\n' "${tried[@]:-nothing}"
printf 'not tried  %s\n' "${not_covered[@]:-nothing}"
((${#tried[@]})) || fail "no environment could be tried"
