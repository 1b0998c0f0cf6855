"""Naming a backend: what is found, and what is said about everything else."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from attn_testkit.registry import BackendNotFound, _import_failed, load_backend, origin_of, registered_backends
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options

MODULE = """
from attn_testkit.contract import AttentionBackend, Capabilities, ForwardMode, KernelBackend, LegacyGraphHooks

class Good(AttentionBackend):
    capabilities = Capabilities(eager={ForwardMode.DECODE})
    def forward(self, q, k, v, layer, batch, save_kv_cache=True): return q
    class Inner:
        pass

class NoForward(AttentionBackend):
    capabilities = Capabilities(eager={ForwardMode.DECODE})

class NoCapabilities(AttentionBackend):
    def forward(self, q, k, v, layer, batch, save_kv_cache=True): return q

class DictCapabilities(NoCapabilities):
    capabilities = {"eager": ["decode"]}

class Other: pass

def factory(): pass

class Older:
    capabilities = Capabilities(eager={"decode"}, graph={"decode"})
    def init_forward_metadata(self, batch): pass
    def init_forward_metadata_capture_cuda_graph(self, *given): pass
    def init_forward_metadata_replay_cuda_graph(self, *given): pass
    def forward(self, q, k, v, layer, batch, save_kv_cache=True): return q

class OlderHooks(Older, LegacyGraphHooks, AttentionBackend): pass
class OlderLast(Older, AttentionBackend, LegacyGraphHooks): pass
class OlderUnheard(Older, AttentionBackend): pass
class OlderInAKernel(Older, KernelBackend):
    def run(self, q, kv, plan): return q
class OlderHalf(LegacyGraphHooks, AttentionBackend):
    capabilities = Older.capabilities
    forward = Older.forward
    init_forward_metadata_capture_cuda_graph = Older.init_forward_metadata_capture_cuda_graph
class OlderEagerOnly(OlderHalf):
    capabilities = Capabilities(eager={"decode"})
    init_forward_metadata = Older.init_forward_metadata
"""
CAPABILITIES = """
from attn_testkit.contract import Capabilities, Requires


capabilities = Capabilities(eager={"decode"}, CLAIM)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A directory with a few modules, where the author stands."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "authored.py").write_text(MODULE)
    (tmp_path / "broken_dependency.py").write_text("import no_such_library\n")
    (tmp_path / "broken_code.py").write_text("\n\nraise RuntimeError('libcudart.so.12: cannot open shared object')\n")
    (tmp_path / "ends.py").write_text("import sys; sys.exit('no GPU')\n")
    yield
    for name in ("authored", "broken_dependency", "broken_code", "declaring", "ends"):
        sys.modules.pop(name, None)


def test_a_class_in_the_current_directory_is_found():
    """A console script alone does not look where the author stands."""
    assert load_backend("authored:Good").__name__ == "Good"
    assert origin_of("authored:Good").label == "(authored.py)"


def test_a_registered_name_is_found_with_its_distribution():
    assert load_backend("torch_native").__name__ == "TorchNativeBackend"
    assert str(origin_of("torch_native")) == "attn-testkit 0.1.0"
    assert origin_of("attn_testkit.backends.torch_native:TorchNativeBackend").label == "0.1.0"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tritno", "unknown backend 'tritno'; did you mean 'triton'?"),
        ("torch-native", "unknown backend 'torch-native'; did you mean 'torch_native'?"),
        ("zzz", "unknown backend 'zzz' (known: "),
        ("zzz", "or module:Class; to add a name, install the package that registers it)"),
        ("authored.Good", "a class is named module:Class, did you mean 'authored:Good'?"),
        ("authored", "unknown backend 'authored'; authored.py is in this folder: write authored.py or authored:Class"),
        ("authored.py", "'authored.py' is a file; a class is named module:Class, did you mean 'authored:Class'?"),
        ("authored.py:Good", "'authored.py:Good' is a file; a class is named module:Class, did you mean"),
        ("./authored:Good", "backend './authored:Good' is a file; a class is named module:Class, did you mean 'author"),
        ("./pkg/ops.py:Good", "did you mean 'pkg.ops:Good'?"),
        ("pkg/ops.py", "did you mean 'pkg.ops:Class'?"),
        ("/home/me/ops.py:Good", "did you mean 'ops:Good'?"),
        ("../ops.py", "did you mean 'ops:Class'?"),
        ("authored:", "backend 'authored:' is incomplete; write module:Class"),
        (":Good", "backend ':Good' is incomplete; write module:Class"),
        ("authored:Godo", "backend 'authored:Godo': authored has no 'Godo'; did you mean 'Good'?"),
        ("authred:Good", "backend 'authred:Good': module 'authred' does not exist; did you mean 'authored'?"),
        ("zzz_nowhere:X", "module 'zzz_nowhere' does not exist; install its package, or run the command in the folder"),
        ("authored:Zzzzzz", "authored has no 'Zzzzzz'; its classes are "),
        ("attn_testkit.contract:Zzzzzz", "attn_testkit.contract has no 'Zzzzzz'; it defines no class"),
        ("attn_testkit.backnds:X", "module 'attn_testkit.backnds' does not exist; did you mean 'attn_testkit.back"),
        ("authored:factory", "backend 'authored:factory' is of type function; expected a class derived"),
        ("authored:Other", "backend 'authored:Other' does not derive from AttentionBackend or KernelBackend"),
        ("authored:NoForward", "backend 'authored:NoForward' does not implement forward"),
        ("authored:NoCapabilities", "sets no capabilities; write capabilities = Capabilities(eager={...}, ...)"),
        ("authored:DictCapabilities", "sets capabilities to a dict; write capabilities = Capabilities("),
        ("authored:OlderLast", "inherits LegacyGraphHooks after AttentionBackend, whose hooks hide it; write class"),
        ("authored:OlderUnheard", "implements init_forward_metadata_capture_cuda_graph, which is called only thr"),
        ("authored:OlderHalf", "does not implement init_forward_metadata_replay_cuda_graph, init_forward_metadata ("),
        ("broken_dependency:X", "failed: ModuleNotFoundError: No module named 'no_such_library' (at "),
        ("broken_dependency:X", "); install no_such_library, or use a Python that has it: attn-testkit --python"),
        ("broken_code:X", "RuntimeError: libcudart.so.12: cannot open shared object (at "),
        ("broken_code:X", "broken_code.py:3)"),
        ("ends:X", "importing ends failed: SystemExit: no GPU"),
    ],
)  # fmt: skip
def test_anything_else_is_one_clear_line(spec, message):
    with pytest.raises(BackendNotFound, match=re.escape(message)) as caught:
        load_backend(spec)
    assert "\n" not in str(caught.value)


def test_a_missing_package_comes_with_the_way_to_install_it(monkeypatch):
    missing = ModuleNotFoundError("No module named 'triton'", name="triton.language")
    present = ModuleNotFoundError("No module named 'pytest.gone'", name="pytest.gone")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "; install triton with pip install 'triton>=3.6" in _import_failed("m:B", "m", missing)
    monkeypatch.undo()
    assert "install" not in _import_failed("m:B", "m", present), "another version of it has that module"
    assert "install" not in _import_failed("m:B", "m", ImportError("libcudart", name="gone"))


@pytest.mark.parametrize("name", ["OlderHooks", "OlderInAKernel", "OlderEagerOnly"])
def test_older_hooks_that_are_whole_or_not_needed_load(name):
    assert load_backend(f"authored:{name}").__name__ == name


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ("bounds={'max_q_rows': '8'}", "Bounds.max_q_rows must be a whole number from 1 on, got '8'"),
        ("bounds={'max_q_rows': 0}", "Bounds.max_q_rows must be a whole number from 1 on, got 0"),
        ("bounds={'max_q_rows': True}", "Bounds.max_q_rows must be a whole number from 1 on, got True"),
        ("bounds={'max_extend_tokens': 0}", "Bounds.max_extend_tokens must be a whole number from 1 on, got 0"),
        ("bounds={'max_topk': -1}", "Bounds.max_topk must be a whole number from 0 on, got -1"),
        ("windows={'layers': 'all'}", "unknown layers 'all' (known: any, one, same)"),
        ("windows={'smallest': -1}", "Windows.smallest must be a whole number from 0 on, got -1"),
        ("server='vlm'", "unknown server 'vlm'; did you mean 'vllm'?"),
        ("takes_out=True", "unknown capability 'takes_out'; did you mean 'server.takes_out'?"),
        ("bounds={'max_context_len': None}", "Bounds.max_context_len must be a whole number from 1 on, got None"),
        ("needs={'cpu_seq_lens': 'no'}", "Needs.cpu_seq_lens must be True or False, got 'no'"),
        ("heads={'head_dims': [[64]]}", "HeadShapes.head_dims must be positive whole numbers"),
        ("graph={'target-verify'}", "max_topk=0 declares no draft tree; write max_topk=1 for chains"),
        ("page_size={16}", "unknown capability 'page_size'; did you mean 'kv_pool.page_sizes'?"),
        ("requires={'sm': 90}", "Capabilities.requires must be a Requires, got {'sm': 90}; write Requires(sm=(90, 90)"),
        ("requires=Requires(sm=90)", "Requires.sm must be the lowest and the highest SM, got 90; write (90, 90)"),
        ("requires=Requires(sm=(9, 0))", "no device is from SM9 to SM0; write (90, 90) for SM90"),
        ("requires=Requires(packages='a>=1')", "Requires.packages must be a tuple, got 'a>=1'; write ('a>=1',)"),
        (
            "requires=Requires(packages=['a b'])",
            "Requires.packages: 'a b' is not a requirement such as 'my-kernels>=1.2'",
        ),
        ("mode_requires={'decod': Requires()}", "unknown mode_requires 'decod'; did you mean 'decode'?"),
        ("mode_requires={'decode': 90}", "Capabilities.mode_requires['decode'] must be a Requires, got 90; write"),
        ("mode_requires=Requires()", "Capabilities.mode_requires must be a dict"),
    ],
)  # fmt: skip
def test_a_capability_that_cannot_be_is_refused_at_the_authors_line(capability, message, tmp_path):
    (tmp_path / "declaring.py").write_text(CAPABILITIES.replace("CLAIM", capability))
    with pytest.raises(BackendNotFound, match=re.escape(message)) as caught:
        load_backend("declaring:X")
    assert str(caught.value).endswith("declaring.py:5)")
    assert "\n" not in str(caught.value)


def test_every_registered_backend_loads_and_says_what_it_declares():
    assert {"torch_native", "triton"} <= {backend.name for backend in registered_backends()}
    runner = Runner(Options(in_process=True))
    lines = dict(
        zip(("torch_native", "triton"), runner.capabilities_lines(("torch_native", "triton"), "cpu"), strict=True)
    )
    for declared, failure in lines.values():
        assert "decode eager+graph" in declared
        assert failure == ""


def test_one_broken_backend_does_not_hide_the_others(monkeypatch):
    import importlib.metadata as metadata

    import attn_testkit.registry as registry

    points = {
        "bad": metadata.EntryPoint("bad", "broken_code:X", registry.GROUP),
        "good": metadata.EntryPoint("good", "authored:Good", registry.GROUP),
    }
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    assert [backend.name for backend in registered_backends()] == ["bad", "good"]
    (_, failure), (declared, _) = Runner(Options(in_process=True)).capabilities_lines(("bad", "good"), "cpu")
    assert "libcudart" in failure
    assert declared.startswith("decode eager; mha; bf16/fp16")


def test_a_wrong_name_is_answered_without_loading_torch():
    code = textwrap.dedent(
        """
        import sys
        from attn_testkit.registry import BackendNotFound, load_backend, origin_of
        origin_of("triton")
        try: load_backend("tritno")
        except BackendNotFound: pass
        sys.exit("torch" in sys.modules)
        """
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def registered(folder: Path, distribution: str, name: str, value: str) -> Path:
    """Metadata of a distribution in a folder that is on the path."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attn_testkit.backends]\n{name} = {value}\n")
    return info / "entry_points.txt"


def test_a_name_that_is_registered_twice_is_an_error_that_names_both_files(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    first = registered(tmp_path / "a", "one", "mine_twice", "attn_testkit.examples:MinimalBackend")
    assert load_backend("mine_twice").__name__ == "MinimalBackend"
    second = registered(tmp_path / "b", "two", "mine_twice", "attn_testkit.examples:OffByOneBackend")
    with pytest.raises(BackendNotFound, match="backend name 'mine_twice' is registered twice") as refused:
        load_backend("mine_twice")
    for text in (str(first), str(second), "one 1.0", "two 1.0", "attn_testkit.examples:OffByOneBackend"):
        assert text in str(refused.value)


def test_one_class_that_two_installations_of_a_package_register_is_no_error(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        monkeypatch.syspath_prepend(tmp_path / folder)
        registered(tmp_path / folder, "one", "mine_once", "attn_testkit.examples:MinimalBackend")
    assert load_backend("mine_once").__name__ == "MinimalBackend"
