"""Checks and collects a guest's outputs.

Outputs are a tar stream on the output disk. :class:`OutputCollector` checks the name, type, number and
size of each file; it lists those it rejects. Accepted files are delivered directly from the disk.
"""

from __future__ import annotations

import errno
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast
from urllib.parse import unquote

from vmjobs.model import ExitChannel, ExitStatus, RejectedEntry
from vmjobs.paths import check_path, matches_glob
from vmjobs.tar_guard import CHUNK, MAX_REJECTED, TarGuard, escape_name

MAX_FILES = 200_000
MAX_EXIT_JSON = 4096
#: The most bytes of a guest's list of omitted outputs, and digits of the size of one.
MAX_UNDELIVERED = 1024 * 1024
MAX_DIGITS = 19
#: Reasons by the word that replaces the size of an output that the guest cannot send.
_OMISSION_REASONS = {
    "link": "not a regular file but a symbolic link",
    "fifo": "not a regular file but a FIFO",
    "socket": "not a regular file but a socket",
    "device": "not a regular file but a device",
    "outside": "it lies outside of the job's directory",
}


class OutputRejected(Exception):
    """An output was rejected; the text is the reason. too_large: it did not fit."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.too_large = too_large


@dataclass(frozen=True)
class CollectedFile:
    """An accepted output: ``size`` bytes at ``offset`` of ``disk``, where it stays."""

    path: str
    disk: Path
    offset: int
    size: int

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the disk at the output's beginning; the caller reads ``size`` bytes."""
        with self.disk.open("rb") as file:
            file.seek(self.offset)
            yield file


@dataclass
class OutputCollector:
    """Accepted and rejected outputs of one run. limit: the most bytes of all together."""

    globs: Sequence[str]
    limit: int
    collected: dict[str, CollectedFile] = field(default_factory=dict)
    rejected: list[RejectedEntry] = field(default_factory=list)
    too_large: bool = False
    #: Reasons by name for outputs that the job requests and that did not arrive.
    lacking: dict[str, str] = field(default_factory=dict)
    _bytes: int = 0
    _directories: set[str] = field(default_factory=set)

    def accept(self, output: CollectedFile) -> None:
        """Accept a file; it replaces an earlier one of the same name.

        Raises:
            OutputRejected: it is listed under ``rejected``.
        """
        self.check(output.path, output.size)
        self._bytes += output.size - self._size_of(output.path)
        self._directories.update(map(str, PurePosixPath(output.path).parents))
        self.collected[output.path] = output
        self.lacking.pop(output.path, None)

    def _size_of(self, name: str) -> int:
        before = self.collected.get(name)
        return 0 if before is None else before.size

    def reject(self, name: str, why: str, place: str = "") -> None:
        """List a rejected output. place: its path in the tar, if not its name."""
        if len(self.lacking) < MAX_REJECTED and self._is_wanted(name):
            self.lacking[escape_name(name)] = why
        entry = rejected_entry(place or name, why)
        if len(self.rejected) < MAX_REJECTED and entry not in self.rejected:
            self.rejected.append(entry)

    def missing(self) -> list[str]:
        """Return the globs that no accepted output matches."""
        return [g for g in self.globs if not any(matches_glob(name, g) for name in self.collected)]

    def check(self, name: str, size: int) -> None:
        """Check the name and size of an output.

        Raises:
            OutputRejected: it is listed under ``rejected``.
        """
        try:
            self._check(name, size)
        except OutputRejected as rejection:
            self.reject(name, str(rejection))
            self.too_large = self.too_large or rejection.too_large
            raise

    def _is_wanted(self, name: str) -> bool:
        return any(matches_glob(name, glob) for glob in self.globs)

    def _check(self, name: str, size: int) -> None:
        if why := check_path(name):
            raise OutputRejected(why)
        if not self._is_wanted(name):
            raise OutputRejected("no output pattern of the job matches it")
        if other := self._conflict(name):
            raise OutputRejected(
                f"it conflicts with the output {other}: a file cannot be a directory too"
            )
        if len(self.collected) >= MAX_FILES:
            raise OutputRejected(f"the job has more than {MAX_FILES} output files")
        if size < 0 or self._bytes - self._size_of(name) + size > self.limit:
            raise OutputRejected(f"the outputs have more than {self.limit} bytes", too_large=True)

    def _conflict(self, name: str) -> str:
        """Return an accepted output that is below or above this name, or ``""``."""
        if name in self._directories:
            return next(path for path in self.collected if path.startswith(f"{name}/"))
        above = (str(path) for path in PurePosixPath(name).parents)
        return next((path for path in above if path in self.collected), "")


def rejected_entry(name: str, why: str) -> RejectedEntry:
    """Return the record of a rejected output, with its name made printable."""
    return RejectedEntry(path=escape_name(name), why=escape_name(why)[:512])


@dataclass(frozen=True)
class DiskContents:
    """Result of reading an output disk.

    complete: false if the tar stream is cut off. begun: at least one entry was read.
    """

    exit: ExitStatus | None
    complete: bool
    begun: bool = False


def read_output_disk(
    disk: Path, output_collector: OutputCollector, streams: dict[str, Path], max_stream: int
) -> DiskContents:
    """Read the guest's tar stream: ``exit.json``, streams, outputs, omitted outputs.

    No entry is extracted under its own name. Of each stream ``max_stream`` bytes are kept.

    Raises:
        OSError: the node could not read the disk, or not write a stream.
    """
    found: ExitStatus | None = None
    begun = complete = False
    try:
        with disk.open("rb") as file:
            for entry, content in _entries(TarGuard(file)):
                begun = True
                if entry.name == "exit.json" and content is not None:
                    found = parse_exit_json(content.read(MAX_EXIT_JSON))
                elif entry.name == "undelivered" and content is not None:
                    reject_omitted(content.read(MAX_UNDELIVERED), output_collector)
                elif entry.name in streams and content is not None:
                    with streams[entry.name].open("wb") as sink:
                        _copy(content, sink, min(entry.size, max_stream))
                else:
                    _collect_entry(entry, disk, output_collector)
        complete = True
    except (tarfile.TarError, EOFError, ValueError, OverflowError):
        pass
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a header leads to an impossible offset
            raise
    return DiskContents(found, complete, begun)


def _entries(file: TarGuard) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    with tarfile.open(fileobj=cast("IO[bytes]", file), mode="r:", errorlevel=2) as tar:
        for count, entry in enumerate(tar):
            if count > MAX_FILES + 3:
                raise tarfile.ReadError("there are too many entries")
            content = tar.extractfile(entry) if _is_plain(entry) else None
            with file.content():
                yield entry, content
            cast(Any, tar).members.clear()  # otherwise tarfile keeps every entry in memory


def reject_omitted(listing: bytes, output_collector: OutputCollector) -> None:
    """List the outputs that the guest omitted.

    listing: a line for each: size or type, and percent-encoded name.
    """
    for line in listing.decode("ascii", "replace").split("\n")[:-1]:
        what, _, name = line.partition(" ")
        name = unquote(name, errors="surrogateescape")
        if name and what in _OMISSION_REASONS:
            output_collector.reject(name, _OMISSION_REASONS[what])
        if not name or not what.isdigit() or len(what) > MAX_DIGITS:
            continue
        try:
            output_collector.check(name, int(what))
        except OutputRejected:
            continue
        output_collector.reject(name, "the guest did not send it")


def _collect_entry(entry: tarfile.TarInfo, disk: Path, output_collector: OutputCollector) -> None:
    name = entry.name.removeprefix("outputs/")
    if entry.isdir():
        return
    if not _is_plain(entry):
        output_collector.reject(name, f"not a regular file but a {_type_name(entry)}", entry.name)
    elif name == entry.name:
        output_collector.reject(entry.name, check_path(name) or "outside of outputs/")
    elif entry.offset_data + entry.size > disk.stat().st_size:
        output_collector.reject(name, "the output disk's data ends before the file's end")
        raise tarfile.ReadError("an entry is cut off")
    else:
        with suppress(OutputRejected):  # the collector lists it; the next entry may be good
            output_collector.accept(CollectedFile(name, disk, entry.offset_data, entry.size))


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """Whether it is a regular, not sparse file: a sparse entry can expand to any size."""
    return entry.isreg() and not entry.issparse()


def _type_name(entry: tarfile.TarInfo) -> str:
    kinds = (
        (entry.issparse(), "sparse file"),
        (entry.issym(), "symbolic link"),
        (entry.islnk(), "hard link"),
        (entry.ischr(), "character device"),
        (entry.isblk(), "block device"),
        (entry.isfifo(), "FIFO"),
    )
    return next((name for is_it, name in kinds if is_it), "special entry")


def parse_exit_json(data: bytes) -> ExitStatus | None:
    """Parse ``{"code": 3}`` or ``{"signal": 9}``; return None for anything else."""
    try:
        value = json.loads(data)
        return ExitStatus(
            code=value.get("code"), signal=value.get("signal"), channel=ExitChannel.OUTPUT_DISK
        )
    except (ValueError, AttributeError, RecursionError):
        return None


def _copy(source: IO[bytes], sink: IO[bytes], size: int) -> None:
    while size > 0 and (chunk := source.read(min(CHUNK, size))):
        sink.write(chunk)
        size -= len(chunk)
