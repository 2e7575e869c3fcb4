"""What a guest delivers, and the gate it goes through.

Outputs are a tar stream on the output disk. Each file passes :class:`OutputTray`, which checks name,
type, count and size; what it refuses is listed, the rest is delivered from where it lies.
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
from vmjobs.paths import matches, refusal
from vmjobs.tar_guard import CHUNK, MAX_REJECTED, Guarded, shown

MAX_FILES = 200_000
MAX_EXIT_JSON = 4096
#: Bytes of what a guest says of outputs that it left out, and digits of the size of one.
MAX_UNDELIVERED = 1024 * 1024
MAX_DIGITS = 19
#: What it says in place of a size, of outputs that it cannot send.
_LEFT_OUT = {
    "link": "not a regular file but a symbolic link",
    "fifo": "not a regular file but a FIFO",
    "socket": "not a regular file but a socket",
    "device": "not a regular file but a device",
    "outside": "it lies outside of the job's directory",
}


class Refused(Exception):
    """One output was not taken; the text says why. ``too_large``: it did not fit."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.too_large = too_large


@dataclass(frozen=True)
class Kept:
    """An accepted output: ``size`` bytes of ``disk`` from ``offset`` on, where it stays."""

    path: str
    disk: Path
    offset: int
    size: int

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The disk, where the output begins: what is behind it is none of it."""
        with self.disk.open("rb") as file:
            file.seek(self.offset)
            yield file


@dataclass
class OutputTray:
    """Accepted outputs of one run.

    limit: bytes that all outputs together may have.
    """

    globs: Sequence[str]
    limit: int
    kept: dict[str, Kept] = field(default_factory=dict)
    rejected: list[RejectedEntry] = field(default_factory=list)
    too_large: bool = False
    #: Why outputs that the job asks for did not arrive, by name.
    lacking: dict[str, str] = field(default_factory=dict)
    _bytes: int = 0
    _directories: set[str] = field(default_factory=set)

    def accept(self, output: Kept) -> None:
        """Take one file, in place of an earlier one of that name.

        Raises:
            Refused: it was not taken, and is listed under ``rejected``.
        """
        self.check(output.path, output.size)
        self._bytes += output.size - self._size_of(output.path)
        self._directories.update(map(str, PurePosixPath(output.path).parents))
        self.kept[output.path] = output
        self.lacking.pop(output.path, None)

    def _size_of(self, name: str) -> int:
        before = self.kept.get(name)
        return 0 if before is None else before.size

    def refuse(self, name: str, why: str, place: str = "") -> None:
        """Note something that is not taken. place: where it lay, where that is not its name."""
        if len(self.lacking) < MAX_REJECTED and self._is_wanted(name):
            self.lacking[shown(name)] = why
        entry = rejected_entry(place or name, why)
        if len(self.rejected) < MAX_REJECTED and entry not in self.rejected:
            self.rejected.append(entry)

    def missing(self) -> list[str]:
        """The globs that nothing answered to."""
        return [g for g in self.globs if not any(matches(name, g) for name in self.kept)]

    def check(self, name: str, size: int) -> None:
        """Look at a file that is offered.

        Raises:
            Refused: it is not taken, and is listed under ``rejected``.
        """
        try:
            self._check(name, size)
        except Refused as refused:
            self.refuse(name, str(refused))
            self.too_large = self.too_large or refused.too_large
            raise

    def _is_wanted(self, name: str) -> bool:
        return any(matches(name, glob) for glob in self.globs)

    def _check(self, name: str, size: int) -> None:
        if why := refusal(name):
            raise Refused(why)
        if not self._is_wanted(name):
            raise Refused("no output glob of the job asks for it")
        if other := self._in_the_way(name):
            raise Refused(f"there is an output {other} too, and a file is no directory")
        if len(self.kept) >= MAX_FILES:
            raise Refused(f"more than {MAX_FILES} files")
        if size < 0 or self._bytes - self._size_of(name) + size > self.limit:
            raise Refused(f"the outputs have more than {self.limit} bytes", too_large=True)

    def _in_the_way(self, name: str) -> str:
        """An accepted output that cannot be in one directory with this; ``""``: there is none."""
        if name in self._directories:
            return next(path for path in self.kept if path.startswith(f"{name}/"))
        above = (str(path) for path in PurePosixPath(name).parents)
        return next((path for path in above if path in self.kept), "")


def rejected_entry(name: str, why: str) -> RejectedEntry:
    """The record of an output that was not taken, whatever its name is made of."""
    return RejectedEntry(path=shown(name), why=shown(why)[:512])


@dataclass(frozen=True)
class DiskContents:
    """What lay on an output disk.

    complete: false if the tar stream breaks off. begun: something could be read of it.
    """

    exit: ExitStatus | None
    complete: bool
    begun: bool = False


def read_output_disk(
    disk: Path, tray: OutputTray, streams: dict[str, Path], max_stream: int
) -> DiskContents:
    """Read the guest's tar stream: ``exit.json``, streams by name, outputs, and what are none.

    Nothing is extracted by its own name; every entry goes to a place we choose. Of a stream
    ``max_stream`` bytes are kept.

    Raises:
        OSError: the node could not read it, or not keep what is in it.
    """
    found: ExitStatus | None = None
    begun = False
    try:
        with disk.open("rb") as file:
            guarded = Guarded(file)
            for entry, content in _entries(guarded):
                begun = True
                if entry.name == "exit.json" and content is not None:
                    found = parse_exit_json(content.read(MAX_EXIT_JSON))
                elif entry.name == "undelivered" and content is not None:
                    refuse_all(content.read(MAX_UNDELIVERED), tray)
                elif entry.name in streams and content is not None:
                    with streams[entry.name].open("wb") as sink:
                        _copy(content, sink, min(entry.size, max_stream))
                else:
                    _take(entry, disk, tray)
    except (tarfile.TarError, EOFError, ValueError, OverflowError):
        return DiskContents(found, False, begun)
    except OSError as error:
        if error.errno != errno.EINVAL:  # there is no such place in the file: its headers say so
            raise
        return DiskContents(found, False, begun)
    return DiskContents(found, True, begun)


def _entries(file: Guarded) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    with tarfile.open(fileobj=cast("IO[bytes]", file), mode="r:", errorlevel=2) as tar:
        for count, entry in enumerate(tar):
            if count > MAX_FILES + 3:
                raise tarfile.ReadError("there are too many entries")
            content = tar.extractfile(entry) if _is_plain(entry) else None
            with file.content():
                yield entry, content
            cast(Any, tar).members.clear()  # it would keep all of them, with all that they say


def refuse_all(listing: bytes, tray: OutputTray) -> None:
    """Outputs that the guest left out: size, or what it is, and percent-encoded name, one a line."""
    for line in listing.decode("ascii", "replace").split("\n")[:-1]:
        what, _, name = line.partition(" ")
        name = unquote(name, errors="surrogateescape")
        if name and what in _LEFT_OUT:
            tray.refuse(name, _LEFT_OUT[what])
        if not name or not what.isdigit() or len(what) > MAX_DIGITS:
            continue
        try:
            tray.check(name, int(what))
        except Refused:
            continue
        tray.refuse(name, "the guest left it out")


def _take(entry: tarfile.TarInfo, disk: Path, tray: OutputTray) -> None:
    name = entry.name.removeprefix("outputs/")
    if entry.isdir():
        return
    if not _is_plain(entry):
        tray.refuse(name, f"not a regular file but a {_type_name(entry)}", entry.name)
    elif name == entry.name:
        tray.refuse(entry.name, "outside of outputs/" if not refusal(name) else refusal(name))
    elif entry.offset_data + entry.size > disk.stat().st_size:
        tray.refuse(name, "what the guest wrote to its output disk ends in the middle of it")
        raise tarfile.ReadError("an entry is cut off")
    else:
        with suppress(Refused):  # listed by the tray; the next entry may be good
            tray.accept(Kept(name, disk, entry.offset_data, entry.size))


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """Whether its content lies there as it is: a sparse entry of a few bytes may stand for any size."""
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
    """``{"code": 3}`` or ``{"signal": 9}``; None for anything else."""
    try:
        value = json.loads(data)
        return ExitStatus(
            code=value.get("code"), signal=value.get("signal"), channel=ExitChannel.OUTPUT_DISK
        )
    except (ValueError, AttributeError, RecursionError):
        return None


def _copy(source: IO[bytes], sink: IO[bytes], size: int) -> int:
    done = 0
    while done < size:
        chunk = source.read(min(CHUNK, size - done))
        if not chunk:
            break
        sink.write(chunk)
        done += len(chunk)
    return done
