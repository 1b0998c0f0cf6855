"""Tests of all packages. Helpers that tests of several folders share lie in ``tests/``, which is on the path by
``pyproject.toml``."""

from pathlib import Path

import pytest

pytest_plugins = ["attn_testkit.plugin", "pytester"]
ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Only sessions of this repository: others that collect ``attn_testkit.suite`` load this file, too."""
    if config.rootpath == ROOT:
        config.pluginmanager.import_plugin("session_of_tests")
