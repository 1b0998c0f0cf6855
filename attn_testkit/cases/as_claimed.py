"""What claims that are narrower than usual change of every case, whoever makes it."""

from __future__ import annotations

from dataclasses import replace

from ..contract import Capabilities
from .case import Case

__all__ = ["as_claimed"]


def as_claimed(claims: Capabilities, case: Case) -> Case:
    """The case, or one like it that a backend with these claims takes. With the usual claims the case itself."""
    if 0 <= case.window < claims.min_window:
        case = replace(case, window=claims.min_window)
    layer_windows = "any" if case.window < 0 else claims.layer_windows
    if layer_windows != case.layer_windows:
        case = replace(case, layer_windows=layer_windows)
    usual_scaling = not claims.any_scaling and case.heads.family != "mla"
    if usual_scaling != case.usual_scaling:
        case = replace(case, usual_scaling=usual_scaling)
    if case.draft and not claims.drafts_without_prefix and not case.prefixed:
        case = replace(case, prefixes=tuple(max(1, prefix) for prefix in case.prefixes), prefixed=True)
    return case
