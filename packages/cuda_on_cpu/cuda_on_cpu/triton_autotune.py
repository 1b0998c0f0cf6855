"""`triton.autotune` without a GPU to time on: the first configuration that the kernel's own pruning leaves is used. A
launch works as on a GPU with a known tuning key: the configuration's `pre_hook` runs, but `reset_to_zero`,
`restore_value` and the tuner's own hooks, which belong to benchmarking, do not. A configuration that fails a
`tl.static_assert` is skipped, like one that does not compile.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

from cuda_on_cpu import session
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.sites import author_site

_REPLACED = ("cache", "cache_results", "pre_hook", "_bench")


def replacements() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for the tuner."""
    try:
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        return [(tuner, "run", _run_of(tuner.run))]
    except (ImportError, AttributeError):
        return []


def _run_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    choices: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.current() is None or len(self.configs) < 2:
            return stock(self, *args, **kwargs)
        unknown = [name for name in _REPLACED if not hasattr(self, name)]
        if unknown:
            raise EmulationError(
                "launch of an autotuned triton kernel",
                author_site(),
                f"this Triton's Autotuner has no {', '.join(unknown)}: it cannot be kept from benchmarking",
                "use a Triton that this package knows, or give the kernel one configuration",
            )
        unfit: list[Any] = []

        def bench(*_: Any, config: Any, **__: Any) -> list[float]:
            return choose(self, float(any(config is other for other in unfit)))

        own = {name: vars(self)[name] for name in _REPLACED if name in vars(self)}
        cache = choices.setdefault(self, {})
        try:
            self.cache, self.cache_results = cache, False
            self.pre_hook, self._bench = _no_hook, bench
            while True:
                try:
                    return stock(self, *args, **kwargs)
                except Exception as failure:
                    if not _is_static(failure) or any(self.best_config is other for other in unfit):
                        raise
                    unfit.append(self.best_config)
                    for key in [key for key, config in cache.items() if config is self.best_config]:
                        del cache[key]
        finally:
            for name in _REPLACED:
                vars(self).pop(name, None)
            vars(self).update(own)

    return run


def choose(tuner: Any, time: float) -> list[float]:
    """Return times for a configuration, which a GPU would measure once for every tuning key."""
    return [time] * 3


def _no_hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
    pass


def _is_static(failure: BaseException) -> bool:
    """True if a `tl.static_assert` raised `failure`: a GPU would not have compiled the kernel."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "static_assert" in trace.tb_frame.f_code.co_name
