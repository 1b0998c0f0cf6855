"""``new``: write the first files of a new backend."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

import click

from ..registry import UsageError
from ..reports.record import cannot_write

_FILES = {
    "{module}.py": ("new_adapter.py.j2", "the backend; `run` says where your kernel goes"),
    "test_{module}.py": ("new_test.py.j2", "one pytest test per case-run"),
    "known_failures.toml": ("new_known_failures.toml.j2", "known failures, none yet"),
    ".github/workflows/conformance.yml": ("new_workflow.yml.j2", "runs all of it on every pull request, without a GPU"),
}
"""Name of a file -> its template in this folder, and what it is."""
_UNTIL_DAYS = 180
_MOST_CHARACTERS = 40
"""Longest name of a module; with a longer one, ruff would format the files differently."""


@click.command(
    short_help="Write an adapter, its test, a known-failures file and a workflow.",
    epilog="""\b
Examples:
  attn-testkit new my_attention
  attn-testkit new my_attention --into backends/mine""",
)
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), metavar="FOLDER", help="Default: a new folder called NAME.")
def new(name: str, into: Path | None) -> int:
    """Write the first files of a new backend: an adapter that passes as it is, a test, a file of known failures, and a
    CI workflow.

    NAME is the name of a module, such as my_attention. Existing files are never overwritten.
    """
    module = _module_name(name)
    folder = into or Path(module)
    texts = _texts(module)
    _refuse_what_exists(folder, texts)
    for file, text in texts.items():
        _write(folder / file, text)
    click.echo(f"written into {folder}:")
    width = max(map(len, texts))
    for file, (_, what) in zip(texts, _FILES.values(), strict=True):
        click.echo(f"  {file:<{width}}  {what}")
    click.echo("next:")
    for command in _next_commands(module, folder):
        click.echo(f"  {command}")
    return 0


def _module_name(name: str) -> str:
    module = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", module) or keyword.iskeyword(module):
        raise UsageError(
            f"{name!r} cannot be the name of a module; expected letters, digits and _, such as my_attention"
        )
    if len(module) > _MOST_CHARACTERS:
        raise UsageError(f"{name!r} has {len(module)} characters; the name of a module may have {_MOST_CHARACTERS}")
    if module.lower() != module:
        raise UsageError(f"{name!r}: the name of a module is in lower case; did you mean {_small(module)!r}?")
    if module in sys.stdlib_module_names or module in ("torch", "attn_testkit", "conftest"):
        raise UsageError(f"{name!r} would hide the module of that name; choose another, such as {module}_attention")
    return module


def _small(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _class_name(module: str) -> str:
    words = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    return words if words.endswith("Backend") else f"{words}Backend"


def _texts(module: str) -> dict[str, str]:
    """Name of a file -> its text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attn_testkit.cli", "."),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    values = {
        "module": module,
        "class": _class_name(module),
        "until": datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=_UNTIL_DAYS),
    }
    return {
        name.format(module=module): environment.get_template(template).render(values)
        for name, (template, _) in _FILES.items()
    }


def _refuse_what_exists(folder: Path, texts: dict[str, str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name another folder with --into")
    there = [file for file in texts if (folder / file).exists() or (folder / file).is_symlink()]
    if there:
        raise UsageError(f"{folder} has {', '.join(there)} already; name another folder with --into")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        if path.parent.is_dir():
            raise cannot_write(path, error) from error
        raise UsageError(f"cannot make {path.parent}: {error.strerror or error}") from error


def _next_commands(module: str, folder: Path) -> list[str]:
    first = ["pip install pytest"]
    enter = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    with contextlib.suppress(ImportError):
        first = [] if importlib.util.find_spec("pytest") else first
    return [
        *enter,
        f"attn-testkit run --backend {module}:{_class_name(module)}",
        *first,
        f"python -m pytest test_{module}.py",
    ]
