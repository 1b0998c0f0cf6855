"""The archive of a submission: results file, known failures with their records, and a manifest of both.

It is a zip file that depends only on its contents. ``submission.json`` is the manifest: facts for readers, and a digest
of each other file. The referee compares it with the results file, which it repeats.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry import UsageError
from ..reports.record import Report, read_report
from ..results.rules import VERSION
from ..results.run_header import RunHeader
from ..running.planning.known_failures import KnownFailure, load_known

__all__ = ["FORMAT", "KNOWN", "RESULTS", "Submission", "facts_of", "pack", "read_submission", "sha256"]

FORMAT = "attn-testkit-submission/1"
"""The format of a submission; its number grows if a reader of the old form would misread the new one."""
MANIFEST, RESULTS, KNOWN = "submission.json", "results.json", "known_failures.toml"
MOST_BYTES = 256 << 20
"""Most bytes of an unpacked submission."""
_EXPECTED = "expected an archive that `attn-testkit submit` writes"


@dataclass(frozen=True)
class Submission:
    """The contents of an archive."""

    name: str
    """The archive's name, for messages."""
    manifest: Mapping[str, Any]
    digests: Mapping[str, str]
    """Name of each other file -> its SHA-256."""
    report: Report
    known: tuple[KnownFailure, ...]

    @property
    def header(self) -> RunHeader:
        """The header of the results."""
        return self.report.header

    @property
    def backend(self) -> str:
        """The spec of the tested backend."""
        return next(iter(self.header.backends), "")

    @property
    def on_hardware(self) -> bool:
        """True if the submission names a real device."""
        return self.manifest.get("device") == "cuda"


def sha256(data: bytes) -> str:
    """Digest of a file."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def facts_of(header: RunHeader) -> dict[str, Any]:
    """Facts of a run that the manifest repeats."""
    return {
        "backend": dict(header.backends),
        "contract": VERSION,
        "declared": dict(header.declared),
        "device": header.device,
        "device_name": header.device_name,
        "kit": header.kit,
        "kit_digest": header.kit_digest,
        "profile": header.tier,
        "profile_digest": header.profile,
        "sources": {spec: dict(source) for spec, source in header.sources.items()},
        "started": header.started,
        "versions": dict(header.versions),
    }


def pack(results: str | Path, known: str | Path | None = None) -> bytes:
    """Pack a results file, and a file of known failures with its records. Raises ``UsageError`` for files that cannot
    be read.
    """
    header = read_report(results).header
    files = {RESULTS: Path(results).read_bytes()}
    if known:
        load_known(known)
        files[KNOWN] = Path(known).read_bytes()
        entries = tomllib.loads(files[KNOWN].decode()).get("known", [])
        for record in (entry["record"] for entry in entries if "record" in entry):
            if Path(record).name != record or record in (MANIFEST, RESULTS, KNOWN):
                raise UsageError(f"{known} names the record {record!r}; expected a file next to it, of another name")
            files[record] = (Path(known).parent / record).read_bytes()
    manifest = {"format": FORMAT, **facts_of(header), "files": {name: sha256(data) for name, data in files.items()}}
    files[MANIFEST] = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            # Without a date: the archive depends on nothing but its contents.
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def read_submission(path: str | Path, data: bytes | None = None) -> Submission:
    """Read an archive, or the ``data`` of one. Raises ``UsageError`` with one line for another file, and for results
    that contradict themselves.
    """
    name = str(path)
    try:
        with zipfile.ZipFile(path if data is None else io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
                raise UsageError(f"{name} unpacks to more than {MOST_BYTES >> 20} MiB; {_EXPECTED}")
            files = {info.filename: archive.read(info) for info in archive.infolist()}
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError) as error:
        raise UsageError(f"{name} is damaged, or not a zip file: {error}; {_EXPECTED}") from error
    try:
        manifest = json.loads(files.pop(MANIFEST))
        found = manifest.get("format")
    except (KeyError, ValueError, AttributeError) as error:
        raise UsageError(f"{name} has no readable {MANIFEST}: {error}; {_EXPECTED}") from error
    if found != FORMAT:
        raise UsageError(f"{name} has format {found!r}; this kit reads {FORMAT}")
    if RESULTS not in files or any(Path(each).name != each for each in files):
        raise UsageError(f"{name} has the files {', '.join(sorted(files)) or 'none'}; {_EXPECTED}")
    with tempfile.TemporaryDirectory() as folder:
        for each, data in files.items():
            (Path(folder) / each).write_bytes(data)
        try:
            report = read_report(Path(folder) / RESULTS)
            known = load_known(Path(folder) / KNOWN) if KNOWN in files else ()
        except UsageError as error:
            raise UsageError(f"{name}: {str(error).replace(f'{folder}/', '')}") from error
    return Submission(name, manifest, {each: sha256(data) for each, data in files.items()}, report, known)
