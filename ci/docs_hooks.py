"""Hooks of mkdocs: generated pages, a nav with globs, links that leave ``docs``, pictures, and colors of failure texts.

Pages in build/pages, which ``ci/reference.py`` writes, are read as if they were in ``docs``. A link to a file outside
``docs`` is relative in the repository; here it becomes one to the repository's address. A page that would fetch
anything from another host, other than by a click, fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = ROOT / "build" / "pages"
SOURCE = "https://github.com/attn-testkit/attn-testkit/blob/main/"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    # The theme's script requests figures from GitHub to show them there.
    r"|<[^>]*\bdata-md-component=[\"']?source\b[^>]*>"
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//\S+"
)
# One of mkdocs's own, whose warnings --strict counts.
_log = logging.getLogger("mkdocs.hooks.docs")


def on_config(config: Any) -> Any:
    """Replace each glob of the nav by its pages, in the order of the links of its section's first page."""
    config.nav = _expanded(config.nav)
    return config


def _expanded(entries: list[Any]) -> list[Any]:
    """Entries of a section with the pages of its globs, at any depth."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append({t: _expanded(e) if isinstance(e, list) else e for t, e in entry.items()})
        else:
            found += _pages(entry, entries[0])
    return found


def _pages(entry: Any, first: Any) -> list[Any]:
    if not isinstance(entry, str) or "*" not in entry:
        return [entry]
    index = _source(first).read_text() if isinstance(first, str) else " "
    found = [page.relative_to(folder).as_posix() for folder in (DOCS, GENERATED) for page in folder.glob(entry)]
    folder = posixpath.dirname(first if isinstance(first, str) else entry)
    return sorted(found, key=lambda page: (index.find(f"({posixpath.relpath(page, folder)})") % len(index), page))


def _source(name: str) -> Path:
    """The file of a page, written by hand or generated."""
    return DOCS / name if (DOCS / name).exists() else GENERATED / name


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and pictures."""
    for path in sorted(GENERATED.rglob("*")):
        if path.is_file():
            files.append(File.generated(config, path.relative_to(GENERATED).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that leave ``docs`` into links to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def to_source(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups(default="")
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if "://" in target or path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, and the repository has no %s", page.file.src_uri, target, path)
        return f"{before}{SOURCE}{path}{anchor}{after}"

    return _LINK.sub(to_source, markdown)


def on_pre_page(page: Any, **_: Any) -> Any:
    """Give each page that is written by hand the address where it is edited."""
    if page.is_homepage or page.file.generated_by:
        return page
    page.edit_url = f"{SOURCE.replace('/blob/', '/edit/')}docs/{page.file.src_uri}"
    return page


_PICTURE = re.compile(r'<img alt="[^"]*" src="([^":]+/)?(rows-[a-z0-9-]+\.svg)" ?/?>')
_MODES = "decode|target-verify|draft-extend|draft-extend-v2|extend|draft-decode"
_LINES = (
    ("kit-head", rf"(?:{_MODES})-[a-z0-9.-]+(?:_[a-z0-9_.-]*)*: .*"),
    ("kit-line kit-hint", r"  hint .*"),
    ("kit-line kit-repro", r"  repro .*"),
    ("kit-line kit-dim", r"  (?:untested|backend|minimal) .*"),
    ("kit-line", r"  (?:check|step|where|spread|attended|needs|case) .*"),
    ("kit-row", r"\S+(?: \S+)*(?: {2,}\S+(?: \S+)*){3,}"),
)
"""Class of a line of a failure text -> pattern of its text."""
_WRAPPED = re.compile(
    r'(<span class="go">  hint [^<\n]*)</span>\n</span>'
    r'<span id="[^"]*">(?:<a [^>]*></a>)?<span class="go"> {11}([^<\n]*)'
)
"""A hint and its next line, which the terminal's width wrapped: the page wraps it by its own."""
_LONG_NAME = re.compile(r"(?<=<code>)[a-z0-9_]{24,}(?=</code>)")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put pictures of rows into the page, where the page's colors apply, and name the lines of failure texts."""
    folder = posixpath.dirname(page.file.src_uri)
    html = _PICTURE.sub(lambda match: _source(posixpath.join(folder, match[1] or "", match[2])).read_text(), html)
    html = _LONG_NAME.sub(lambda match: match[0].replace("_", "_<wbr>"), html)
    wrapped = 1
    while wrapped:
        html, wrapped = _WRAPPED.subn(r"\1 \2", html)
    above = ""

    def with_class(match: re.Match[str]) -> str:
        nonlocal above
        if not match[1].startswith(" " * 11):
            above = next((name for name, pattern in _LINES if re.fullmatch(pattern, match[1])), "")
        return f'<span class="go {above}">{match[1]}</span>' if above else match[0]

    return re.sub(r'<span class="go">([^<\n]*)</span>', with_class, html)


def on_post_build(config: Any) -> None:
    """Refuse a site that loads a script, a style, a font or a picture from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            found = _FETCHED.search(path.read_text())
            if found:
                raise PluginError(f"{path} would fetch from another host: {found[0]}")
