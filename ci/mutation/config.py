"""What is mutated, and by which stages a mutant is judged: ``mutants.toml``."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class ConfigError(Exception):
    """Wrong usage, in one line."""


@dataclass(frozen=True)
class Stage:
    """One process that a mutant must survive: a module that is run, with its arguments."""

    argv: tuple[str, ...]

    @property
    def name(self) -> str:
        """As one would type it."""
        return " ".join(self.argv)


@dataclass(frozen=True)
class Config:
    """The file, with ``root`` as an absolute path. All other paths are relative to it, with ``/``."""

    root: Path
    paths: tuple[str, ...]
    """Files and folders that are mutated."""
    packages: dict[str, str]
    """Folder -> the package that it is imported as."""
    tests: dict[str, tuple[str, ...]]
    """Folder or file -> what pytest runs for a mutant in it, the most telling first; the longest that fits counts.

    Several tests in one entry, with spaces between them, share a process.

    ``tests/<name of the folder>``, where there is such a folder, comes before all of them, unless they name some of it.
    """
    smoke: tuple[tuple[str, ...], ...]
    """What runs after the tests, whatever was mutated: module and arguments."""
    warm: tuple[str, ...]
    """Modules that are imported once, before the processes fork, where they are installed."""
    unseen: frozenset[str]
    """Keyword arguments that say nothing of behaviour: never mutated, whoever is called."""
    watched: tuple[str, ...]
    """Files and folders whose change makes earlier verdicts void."""

    def files(self, only: Sequence[str] = ()) -> Iterator[Path]:
        """Python files that are mutated, or those below ``only``. Raises ``ConfigError`` for a path that is none."""
        for name in only or self.paths:
            path = (self.root / name).resolve()
            found = [path] if path.suffix == ".py" and path.is_file() else sorted(path.rglob("*.py"))
            if not found or not path.is_relative_to(self.root):
                raise ConfigError(f"no Python file at {name}")
            yield from found

    def module(self, path: str) -> str:
        """The name that a file is imported under. Raises ``ConfigError`` if it is in no package."""
        for folder, package in self.packages.items():
            if PurePosixPath(path).is_relative_to(folder):
                inside = PurePosixPath(path).relative_to(folder).with_suffix("")
                return ".".join([package, *(part for part in inside.parts if part != "__init__")])
        raise ConfigError(f"{path} is in none of {', '.join(self.packages)}")

    def stages(self, path: str) -> list[Stage]:
        """What judges a mutant of this file. Raises ``ConfigError`` when no test does, or one is not there."""
        folders = [folder for folder in self.tests if PurePosixPath(path).is_relative_to(folder)]
        if not folders:
            raise ConfigError(f"no tests are named for {path}")
        folder = max(folders, key=len)
        own = f"tests/{PurePosixPath(folder).name}"
        named = self.tests[folder]
        if (self.root / own).is_dir() and not any(f"{own}/" in entry for entry in named):
            named = (own, *named)
        tests = dict.fromkeys(named)
        if missing := [test for entry in tests for test in entry.split() if not (self.root / test).exists()]:
            raise ConfigError(f"no such tests: {', '.join(missing)}")
        return [*(Stage(("pytest", *test.split())) for test in tests), *(Stage(argv) for argv in self.smoke)]

    def fingerprint(self) -> str:
        """Changes with every file that a verdict depends on."""
        digest = hashlib.sha256()
        for name in self.watched:
            path = self.root / name
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file() and "__pycache__" not in file.parts:
                    digest.update(f"{file.relative_to(self.root)}\0".encode() + file.read_bytes() + b"\0")
        digest.update(repr((self.tests, self.smoke)).encode())
        return digest.hexdigest()[:16]


def load_config(file: Path) -> Config:
    """Read the file. ``root`` in it is relative to its folder. Raises ``ConfigError`` for one that is none."""
    try:
        told = tomllib.loads(file.read_text())
        return Config(
            root=(file.parent / told["root"]).resolve(),
            paths=tuple(told["paths"]),
            packages=dict(told["packages"]),
            tests={folder: tuple(tests) for folder, tests in told["tests"].items()},
            smoke=tuple(tuple(argv) for argv in told.get("smoke", ())),
            warm=tuple(told.get("warm", ())),
            unseen=frozenset(told.get("unseen", ())),
            watched=tuple(told["watched"]),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {file}: {type(error).__name__}: {error}") from error
