"""The site: every page is in its nav, nothing of it comes from another host, and nothing of the kit needs it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import yaml
from packaging.requirements import Requirement
from pages import all_pages
from transcript import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def entries(nav: Any) -> Iterator[str]:
    """Pages and globs of a nav."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def test_every_page_stands_in_the_nav_once_and_every_entry_is_a_page() -> None:
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).as_posix() for page in all_pages() if docs in page.parents]
    found = {entry: [page for page in pages if fnmatch(page, entry)] for entry in entries(CONFIG["nav"])}
    assert sorted(page for listed in found.values() for page in listed) == sorted(pages)
    assert [entry for entry, listed in found.items() if not listed] == []


def test_no_font_is_fetched_and_no_plugin_or_style_comes_from_elsewhere() -> None:
    assert CONFIG["theme"]["font"] is False
    assert CONFIG["plugins"] == ["search"]
    assert all((ROOT / "docs" / path).exists() for path in CONFIG["extra_css"])
    # With a repository the theme's script asks its host for stars and forks.
    assert not {"extra_javascript", "repo_url"} & set(CONFIG)


def test_what_mkdocs_remarks_on_is_a_warning_and_the_build_is_strict() -> None:
    for section in CONFIG["validation"].values():
        assert set(section.values()) == {"warn"}
    script = (ROOT / "ci" / "docs.sh").read_text()
    assert "mkdocs build --strict" in script
    # It counts what is logged, and --quiet logs no warning.
    assert "--quiet build" not in script
    assert "--strict --quiet" not in script


def test_the_generator_is_an_extra_in_a_range_and_no_dependency() -> None:
    needed = {Requirement(text).name for text in PROJECT["dependencies"]}
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["docs"]]
    assert {each.name for each in extra} == {"mkdocs", "mkdocs-material"}
    assert all({spec.operator for spec in each.specifier} == {">=", "<"} for each in extra)
    assert not needed & {each.name for each in extra}


def test_ci_builds_the_site() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "pr.yml").read_text())
    assert "bash ci/docs.sh" in [step.get("run") for step in flow["jobs"]["docs"]["steps"]]
