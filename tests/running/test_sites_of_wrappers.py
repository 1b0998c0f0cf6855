"""A wrapper around the author's launches is not the author's line."""

from __future__ import annotations

import sys

from attn_testkit.watches.launches import _Wrapped
from cuda_on_cpu.sites import Site, author_site


def stock(kernel: object, *args: object) -> Site:
    __tracebackhide__ = True
    return author_site()


def test_where_names_the_line_that_launches_and_not_the_wrapper_that_counts() -> None:
    run = _Wrapped()._kernel(stock)
    line = sys._getframe().f_lineno + 1
    site = run(object(), 1)
    assert (site.filename, site.line, site.function) == (__file__, line, sys._getframe().f_code.co_name)
