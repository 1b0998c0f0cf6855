#!/usr/bin/env bash
# Builds the wheels of the four distributions into OUT, unpacks them into OUT/unpacked, and checks that each holds its tree and
# works where nothing else of the repository is installed: ci/wheels.sh OUT
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
out="$(realpath -m "${1:?usage: ci/wheels.sh OUT}")"
cd "$root"
mkdir -p "$out/wheels"

for folder in . packages/*/; do
  # setuptools puts what an earlier build left there into the wheel, modules that have moved too.
  rm -rf "$folder"/build/lib "$folder"/build/bdist.*
done
"$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir "$out/wheels" \
  . packages/cuda_on_cpu packages/corpus packages/servers
for wheel in "$out"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$out/unpacked"; done
diff \
  <(find attn_testkit runner_modes packages/cuda_on_cpu/cuda_on_cpu packages/corpus/attn_testkit_corpus \
    packages/servers/attn_testkit_servers -type f ! -name '*.pyc' ! -name README.md |
    sed 's|^runner_modes/|attn_testkit/runner_modes/|; s|^packages/[^/]*/||' | sort) \
  <(cd "$out/unpacked" && find attn_testkit cuda_on_cpu attn_testkit_corpus attn_testkit_servers -type f | sort) ||
  { echo "ci/wheels.sh: the wheels lack the files marked <; see [tool.setuptools] in their pyproject.toml" >&2; exit 1; }

# An environment with what they depend on, and none of the four. A checkout's is made of links in their finders.
alone="$out/alone"
"$python" -m venv --without-pip "$alone"
mkdir "$out/dependencies"
"$python" - "$out/dependencies" << 'PYTHON'
import os, re, sys
ours = re.compile(r"(__editable__.*|attn[-_.]testkit.*|cuda_on_cpu.*|.*\.pth|__pycache__)$")
for folder in filter(os.path.isdir, sys.path):
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        for name in os.listdir(folder):
            link = os.path.join(sys.argv[1], name)
            if not ours.match(name) and not os.path.lexists(link):
                os.symlink(os.path.join(folder, name), link)
PYTHON
echo "$out/dependencies" > "$("$alone/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
pip=("$python" -m pip --quiet --disable-pip-version-check --python "$alone/bin/python")
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=""
unset PYTHONPATH

fail() { echo "ci/wheels.sh: $*" >&2; exit 1; }
install() { "${pip[@]}" install --no-deps --no-index "$out/wheels/$1"-[0-9]*.whl; }
within() { (cd "$out" && "$alone/bin/python" -W ignore "$@"); }
says() { # what it must say, and a command of attn-testkit that fails as one that is not installed does
  local wanted="$1" said code=0
  shift
  said="$(within -m attn_testkit "$@" 2>&1)" || code=$?
  [[ $code -eq 4 && "$said" == *"$wanted"* ]] || fail "attn-testkit $*: exit code $code, and not '$wanted': $said"
}

within -c 'import attn_testkit' 2> /dev/null && fail "the environment has a kit before any is installed"
install cuda_on_cpu
within -c '
import torch
from cuda_on_cpu import emulated_cuda
with torch.no_grad(), emulated_cuda():
    x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6, 6]' || fail "cuda_on_cpu does not work alone"
install attn_testkit
listed="$(within -m attn_testkit list --json)" || fail "attn-testkit list fails"
[[ "$listed" == *trtllm_mha* ]] || fail "attn-testkit list lacks trtllm_mha"
within -m attn_testkit run --backend torch_native --device cpu --mode decode --execution eager > "$out/run" 2>&1 ||
  { cat "$out/run" >&2; fail "the kit does not run alone"; }
says "pip install 'PATH_OF_THE_CHECKOUT/packages/corpus'" audit --device cpu
says "pip install 'PATH_OF_THE_CHECKOUT/packages/servers'" record --help
says "pip install 'PATH_OF_THE_CHECKOUT/packages/servers'" run --backend sglang:triton --device cpu
install attn_testkit_corpus
listed="$(within -m attn_testkit audit --list)" || fail "attn-testkit audit --list fails"
[[ "$listed" == *qlens-packed-vs-uniform-stride* ]] || fail "attn-testkit audit --list lacks the seeded bugs"
[[ "$(within -m attn_testkit --version)" == *"is compared with"* ]] || fail "attn-testkit --version lacks the calibrations"
"${pip[@]}" uninstall --yes attn-testkit-corpus
install attn_testkit_servers
within -m attn_testkit record --help > /dev/null || fail "attn-testkit record does not come with attn_testkit_servers"
within -c '
from attn_testkit.registry import BackendNotFound, bridges, load_backend
import attn_testkit_servers.fakes.trtllm, attn_testkit_servers.record.cases
assert set(bridges()) == {"sglang", "vllm"}
try: load_backend("sglang:nothing")
except BackendNotFound as error: assert "nothing" in str(error) or "sglang" in str(error), error' || fail "attn_testkit_servers does not work with the kit"
