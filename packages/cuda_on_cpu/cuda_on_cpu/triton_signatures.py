"""Selection of the replacements in Triton's interpreter that accept every call that the stock functions accept.

A release of Triton may rename a parameter, add one, or call by name what it called by position. A replacement without
support for that would fail correct kernels, so it is left out, and the stock function is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

Replacement = tuple[Any, str, Any]
_ANY_POSITION, _ANY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_BY_NAME_ONLY = inspect.Parameter.KEYWORD_ONLY
_NONE = inspect.Parameter.empty


def fitting(replacements: Iterable[Replacement]) -> list[Replacement]:
    """Elements of ``replacements``, (object, attribute, replacement), that accept all arguments of the present
    attribute."""
    return [(owner, name, new) for owner, name, new in replacements if not complaint(stock_of(owner, name), new)]


def stock_of(owner: Any, name: str) -> Any:
    """The present value of ``name``; None for a function that this Triton does not have."""
    return inspect.getattr_static(owner, name, None)


def complaint(stock: Any, replacement: Any) -> str:
    """Reason why ``replacement`` cannot be used instead of ``stock``; empty if it can, or if there is no ``stock``."""
    if stock is None:
        return ""
    if not callable(stock) or isinstance(stock, property):
        alike = type(stock) is type(replacement)
        return "" if alike else f"a {type(replacement).__name__} replaces a {type(stock).__name__}"
    wanted, given = _parameters(stock), _parameters(replacement)
    for at, parameter in enumerate(wanted):
        missing = _not_taken(parameter, at, given)
        if missing:
            return missing
    names = {parameter.name for parameter in wanted}
    extra = [parameter.name for parameter in given if parameter.default is _NONE and not _takes_more(parameter)]
    unknown = [name for name in extra if name not in names]
    return f"it needs {', '.join(unknown)}, which the stock function does not have" if unknown else ""


def _parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function, follow_wrapped=False).parameters.values())


def _takes_more(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (_ANY_POSITION, _ANY_NAME)


def _not_taken(wanted: inspect.Parameter, at: int, given: list[inspect.Parameter]) -> str:
    """Reason why a parameter of the stock function, its number ``at``, cannot be given."""
    kinds = {parameter.kind for parameter in given}
    if _takes_more(wanted):
        what = "any further positional arguments" if wanted.kind is _ANY_POSITION else "any further named arguments"
        return "" if wanted.kind in kinds else f"the stock function takes {what}"
    named = [parameter for parameter in given if not _takes_more(parameter)]
    places = [i for i, parameter in enumerate(named) if parameter.name == wanted.name]
    if not places:
        if _ANY_NAME not in kinds or (wanted.kind is not _BY_NAME_ONLY and _ANY_POSITION not in kinds):
            return f"it does not take {wanted.name!r}"
        positional = [parameter.name for parameter in named if parameter.kind is not _BY_NAME_ONLY]
        return f"it takes {positional[at]!r} where {wanted.name!r} is given" if at < len(positional) else ""
    own = named[places[0]]
    if wanted.kind is not _BY_NAME_ONLY and places[0] != at:
        return f"{wanted.name!r} is its parameter {places[0] + 1}, and number {at + 1} of the stock function"
    if wanted.default is not _NONE and (own.default is _NONE or own.default != wanted.default):
        return f"{wanted.name!r} is {wanted.default!r} where it is left out"
    return ""
