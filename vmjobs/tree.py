"""A job's directory as tar streams: on its way into a machine, and what has changed on its way back.

What comes back was made by a guest: nothing of it may lead out of the directory, whatever lies there.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from vmjobs.agent.outputs import Guarded
from vmjobs.errors import InvalidRequest

CHUNK = 1024 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Of modes: neither set-user-id nor any other special bit.
_PLAIN = 0o777


def pack(directory: Path, sink: IO[bytes], without: Collection[str] = ()) -> frozenset[str]:
    """Write a directory as a tar stream; the names in it, like ``a/b``.

    without: names at its top that stay here. Sockets, FIFOs and devices do too, and what goes
        meanwhile.
    """
    sent: set[str] = set()

    def taken(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = entry.name.removeprefix("./")
        kind = entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()
        if name in without or not kind:
            return None
        if name != ".":
            sent.add(name)
        return entry

    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        tar.add(directory, ".", recursive=False)
        for path in sorted(directory.iterdir()):
            with suppress(FileNotFoundError):
                tar.add(path, f"./{path.name}", filter=taken)
    return frozenset(sent)


def unpack(stream: IO[bytes], directory: Path, without: Collection[str] = ()) -> None:
    """Put the entries of a tar stream in place of what a directory has; devices are left out.

    without: names at its top that stay as they are.

    Raises:
        InvalidRequest: the stream breaks off, is none, or has what no job leaves.
    """
    top = os.open(directory, _DIRECTORY)
    modes: dict[tuple[str, ...], int] = {}
    try:
        guarded = cast("IO[bytes]", Guarded(stream, max_headers=None))
        with tarfile.open(fileobj=guarded, mode="r:", errorlevel=2) as tar:
            for entry in tar:
                parts = _parts(entry.name)
                if parts and parts[0] not in without:
                    _put(top, parts, entry, tar, cast(Any, guarded))
                    if entry.isdir():
                        modes[tuple(parts)] = entry.mode & _PLAIN
                cast(Any, tar).members.clear()
        # Only now: what is in a directory of which nobody may write has to get there first.
        for place in sorted(modes, key=len, reverse=True):
            # What came later may have taken its place, as may a link.
            with suppress(FileNotFoundError, NotADirectoryError), _directory(top, place) as found:
                os.fchmod(found, modes[place])
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"what the job left is not to be read: {error}") from error
    finally:
        os.close(top)


def remove(directory: Path, names: Collection[str]) -> None:
    """Remove names below a directory, as far as they are there."""
    top = os.open(directory, _DIRECTORY)
    try:
        for name in sorted(names, reverse=True):  # what is in a directory comes before it
            with suppress(OSError), _parent(top, parts := _parts(name)) as parent:
                _unlink(parent, parts[-1])
    finally:
        os.close(top)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidRequest(f"what the job left leads out of its directory: {name[:200]!r}")
    return parts


def _parent(top: int, parts: Sequence[str]) -> AbstractContextManager[int]:
    """The directory that an entry is in."""
    return _directory(top, parts[:-1])


@contextmanager
def _directory(top: int, parts: Sequence[str]) -> Iterator[int]:
    """A directory below another one; no link is followed on the way, nor at its end."""
    at = os.dup(top)
    try:
        for part in parts:
            below = os.open(part, _DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _put(
    top: int, parts: list[str], entry: tarfile.TarInfo, tar: tarfile.TarFile, guarded: Any
) -> None:
    name = parts[-1]
    with _parent(top, parts) as parent:
        if entry.isdir():
            _make_directory(parent, name)
        elif entry.issym():
            _unlink(parent, name)
            os.symlink(entry.linkname, name, dir_fd=parent)
        elif entry.islnk():
            source = _parts(entry.linkname)
            if not source:
                raise InvalidRequest("what the job left has a link to its directory itself")
            with _parent(top, source) as other:
                _unlink(parent, name)
                os.link(source[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        elif entry.issparse():  # a few bytes may stand for a file of any size
            raise InvalidRequest(f"what the job left has a sparse entry: {entry.name[:200]!r}")
        elif entry.isreg() and (content := tar.extractfile(entry)) is not None:
            _unlink(parent, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as sink:
                with guarded.content():
                    shutil.copyfileobj(content, sink, CHUNK)
                os.fchmod(sink.fileno(), entry.mode & _PLAIN)
                os.utime(sink.fileno(), (entry.mtime, entry.mtime))


def _make_directory(parent: int, name: str) -> None:
    if not _is_directory(parent, name):
        _unlink(parent, name)
        os.mkdir(name, dir_fd=parent)
    os.chmod(name, 0o700, dir_fd=parent)


def _is_directory(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _unlink(parent: int, name: str) -> None:
    if _is_directory(parent, name):
        shutil.rmtree(name, dir_fd=parent)
    else:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
