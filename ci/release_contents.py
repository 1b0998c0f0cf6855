"""Check of the contents of a wheel and an sdist: files, license, version, size.

python ci/release_contents.py TREE WHEEL SDIST MOST_KILOBYTES
"""

from __future__ import annotations

import ast
import email
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from pathlib import Path, PurePosixPath

NEEDED_IN_SDIST = ("LICENSE", "README.md", "pyproject.toml", "attn_testkit/__init__.py", "runner_modes/__init__.py")


def main(tree: Path, wheel: Path, sdist: Path, most_kilobytes: int) -> int:
    """Print each complaint; return 1 if there is any."""
    complaints = [
        *_of_wheel(tree, wheel),
        *_of_sdist(tree, sdist),
        *_of_size((wheel, sdist), most_kilobytes),
    ]
    for complaint in complaints:
        print(f"ci/release_contents.py: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def version_in(tree: Path) -> str:
    """Read ``attn_testkit.__version__`` without importing it."""
    for node in ast.parse((tree / "attn_testkit" / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("attn_testkit/__init__.py sets no __version__")


def _of_wheel(tree: Path, wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"attn_testkit-{version_in(tree)}.dist-info"
        wanted = {
            _shipped(path.relative_to(tree)) for top in ("attn_testkit", "runner_modes") for path in _files(tree / top)
        }
        found = {name for name in names if not name.startswith("attn_testkit-")}
        yield from _difference("the wheel", wanted, found)
        for name in ("METADATA", "licenses/LICENSE", "entry_points.txt"):
            if f"{info}/{name}" not in names:
                yield f"the wheel lacks {info}/{name}"
                return
        yield from _of_metadata(tree, email.message_from_bytes(archive.read(f"{info}/METADATA")))
        if archive.read(f"{info}/licenses/LICENSE") != (tree / "LICENSE").read_bytes():
            yield "the wheel's licence is not the tree's"


def _shipped(path: Path) -> str:
    """Path in the wheel of a file of the tree."""
    return str(
        PurePosixPath("attn_testkit", *path.parts) if path.parts[0] == "runner_modes" else PurePosixPath(*path.parts)
    )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _difference(where: str, wanted: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    wanted, found = set(wanted), set(found)
    yield from (f"{where} lacks {name}" for name in sorted(wanted - found))
    yield from (f"{where} has {name}, which is not in the tree" for name in sorted(found - wanted))


def _of_metadata(tree: Path, metadata: Message) -> Iterator[str]:
    version = version_in(tree)
    for name, wanted in (("Name", "attn-testkit"), ("Version", version), ("License-Expression", "Apache-2.0")):
        if metadata[name] != wanted:
            yield f"the metadata's {name} is {metadata[name]!r}, expected {wanted!r}"
    if not metadata["Requires-Python"] or not metadata.get_payload():
        yield "the metadata lack Requires-Python or the README"


def _of_sdist(tree: Path, sdist: Path) -> Iterator[str]:
    with tarfile.open(sdist) as archive:
        names = {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in archive if member.isfile()}
    yield from (f"the sdist lacks {name}" for name in NEEDED_IN_SDIST if name not in names)
    code = {str(path.relative_to(tree)) for top in ("attn_testkit", "runner_modes") for path in _files(tree / top)}
    yield from (f"the sdist lacks {name}" for name in sorted(code - names))
    yield from (f"the sdist has {name}" for name in sorted(names) if name.endswith(".pyc") or name.startswith(".venv"))


def _of_size(files: Iterable[Path], most_kilobytes: int) -> Iterator[str]:
    for path in files:
        size = path.stat().st_size / 1024
        if size > most_kilobytes:
            yield f"{path.name} has {size:.0f} KiB, more than {most_kilobytes}"


if __name__ == "__main__":
    if len(sys.argv) != 5 or not sys.argv[4].isdecimal():
        raise SystemExit(__doc__)
    sys.exit(main(*map(Path, sys.argv[1:4]), int(sys.argv[4])))
