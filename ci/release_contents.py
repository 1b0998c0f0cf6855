"""Check of the contents of the wheels and sdists of the four distributions: files, license, version, size.

python ci/release_contents.py TREE DIST MOST_KILOBYTES
"""

from __future__ import annotations

import email
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True)
class Distribution:
    """A folder of the tree that a wheel and an sdist are built from."""

    folder: str
    packages: tuple[tuple[str, str], ...]
    """(package in the folder, its path in the wheel)."""
    needed: tuple[str, ...]
    """Files that the sdist must have, besides the packages."""


_NEEDED = ("LICENSE", "README.md", "pyproject.toml")
DISTRIBUTIONS = (
    Distribution(
        ".", (("attn_testkit", "attn_testkit"), ("runner_modes", "attn_testkit/runner_modes")),
        (*_NEEDED, "attn_testkit/VERSION", "attn_testkit/__init__.py", "runner_modes/__init__.py"),
    ),
    Distribution("packages/cuda_on_cpu", (("cuda_on_cpu", "cuda_on_cpu"),), (*_NEEDED, "VERSION")),
    Distribution("packages/corpus", (("attn_testkit_corpus", "attn_testkit_corpus"),), (*_NEEDED, "VERSION")),
    Distribution("packages/servers", (("attn_testkit_servers", "attn_testkit_servers"),), (*_NEEDED, "VERSION")),
)  # fmt: skip


def main(tree: Path, dist: Path, most_kilobytes: int) -> int:
    """Print each complaint; return 1 if there is any."""
    complaints = [
        each for distribution in DISTRIBUTIONS for each in _complaints(tree, dist, distribution, most_kilobytes)
    ]
    for complaint in complaints:
        print(f"ci/release_contents.py: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def version_in(tree: Path) -> str:
    """The version that all of them have."""
    return (tree / "attn_testkit" / "VERSION").read_text("utf-8").strip()


def _complaints(tree: Path, dist: Path, distribution: Distribution, most_kilobytes: int) -> Iterator[str]:
    folder = tree / distribution.folder
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    stem = f"{project['name'].replace('-', '_')}-{version_in(tree)}"
    wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    if missing := [file.name for file in (wheel, sdist) if not file.exists()]:
        yield f"there is no {' and no '.join(missing)}"
        return
    said = [
        *_of_wheel(tree, folder, distribution, project, wheel),
        *_of_sdist(folder, distribution, sdist),
        *_of_size((wheel, sdist), most_kilobytes),
    ]
    yield from (f"{stem}: {each}" for each in said)


def _of_wheel(
    tree: Path, folder: Path, distribution: Distribution, project: dict[str, Any], wheel: Path
) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
        wanted = {
            str(PurePosixPath(inside, path.relative_to(folder / package)))
            for package, inside in distribution.packages
            for path in _files(folder / package)
        }
        yield from _difference("the wheel", wanted, {name for name in names if not name.startswith(f"{info}/")})
        joins = ("entry_points.txt",) if "scripts" in project or "entry-points" in project else ()
        for name in ("METADATA", "licenses/LICENSE", *joins):
            if f"{info}/{name}" not in names:
                yield f"the wheel lacks {info}/{name}"
                return
        yield from _of_metadata(tree, project, email.message_from_bytes(archive.read(f"{info}/METADATA")))
        if archive.read(f"{info}/licenses/LICENSE") != (tree / "LICENSE").read_bytes():
            yield "the wheel's licence is not the tree's"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _difference(where: str, wanted: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    wanted, found = set(wanted), set(found)
    yield from (f"{where} lacks {name}" for name in sorted(wanted - found))
    yield from (f"{where} has {name}, which is not in the tree" for name in sorted(found - wanted))


def _of_metadata(tree: Path, project: dict[str, Any], metadata: Message) -> Iterator[str]:
    expected = {"Name": project["name"], "Version": version_in(tree), "License-Expression": "Apache-2.0"}
    for name, wanted in expected.items():
        if metadata[name] != wanted:
            yield f"the metadata's {name} is {metadata[name]!r}, expected {wanted!r}"
    if not metadata["Requires-Python"] or not metadata.get_payload():
        yield "the metadata lack Requires-Python or the README"


def _of_sdist(folder: Path, distribution: Distribution, sdist: Path) -> Iterator[str]:
    with tarfile.open(sdist) as archive:
        # A link would lead out of it.
        names = {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in archive if member.isfile()}
    yield from (f"the sdist lacks {name}" for name in distribution.needed if name not in names)
    code = {str(path.relative_to(folder)) for package, _ in distribution.packages for path in _files(folder / package)}
    yield from (f"the sdist lacks {name}" for name in sorted(code - names - set(distribution.needed)))
    yield from (f"the sdist has {name}" for name in sorted(names) if name.endswith(".pyc") or name.startswith(".venv"))


def _of_size(files: Iterable[Path], most_kilobytes: int) -> Iterator[str]:
    for path in files:
        size = path.stat().st_size / 1024
        if size > most_kilobytes:
            yield f"{path.name} has {size:.0f} KiB, more than {most_kilobytes}"


if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[3].isdecimal():
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
