"""What a worker needs does not lean on the oracle, which is sealed there."""

import inspect
import sys

from attn_testkit.running.case_runs import worker_main
from attn_testkit.running.hygiene.oracle_sealed import _EXPECTED, _open_modules, _sealed_packages


def test_open_modules_of_families_call_no_sealed_function() -> None:
    assert worker_main.seal_oracle
    sealed = (_EXPECTED, *_sealed_packages())
    names = _open_modules()
    leaning = {
        f"{name}.{function.__name__}"
        for name in names
        # The module that only names a family's parts names its answer too.
        if name.startswith("attn_testkit.") and not name.endswith(".family")
        for function in map(inspect.unwrap, filter(callable, vars(sys.modules[name]).values()))
        if inspect.isfunction(function) and function.__module__.startswith(sealed) and function.__module__ not in names
    }
    assert leaning == set()
