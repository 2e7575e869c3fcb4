"""A job's directory as tar streams: on its way into a machine, and what has changed on its way back.

What comes back was made by a guest: nothing of it may lead out of the directory, whatever lies there.
HTCondor follows links there, perhaps while they still arrive. So each link is one that can never lead
out, whatever comes before or after it: its target first goes up, no higher than to that directory,
and then only down.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from contextlib import contextmanager, suppress

from vmjobs.errors import InvalidRequest
from vmjobs.tar_guard import CHUNK, MAX_REJECTED, Guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import IO, Any

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Of modes: neither set-user-id nor any other special bit.
_PLAIN = 0o777


def pack(directory: str | Path, sink: IO[bytes], without: Collection[str] = ()) -> frozenset[str]:
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
        for name in sorted(os.listdir(directory)):
            with suppress(FileNotFoundError):
                tar.add(os.path.join(directory, name), f"./{name}", filter=taken)
    return frozenset(sent)


def unpack(stream: IO[bytes], directory: str | Path, without: Collection[str] = ()) -> dict[str, str]:
    """Put the entries of a tar stream in place of what a directory has. Links that may lead out of it,
    devices and FIFOs are left out: returns their names, and why.

    without: names at its top that stay as they are.

    Raises:
        InvalidRequest: the stream breaks off, is none, or has what no job leaves.
    """
    top = os.open(directory, _DIRECTORY)
    modes: dict[tuple[str, ...], int] = {}
    refused: dict[str, str] = {}
    try:
        guarded: Any = Guarded(stream, max_headers=None)
        with tarfile.open(fileobj=guarded, mode="r:", errorlevel=2) as tar:
            for entry in tar:
                parts = _parts(entry.name)
                if parts and parts[0] not in without:
                    why = _put(top, parts, entry, tar, guarded)
                    if why and len(refused) < MAX_REJECTED:
                        refused["/".join(parts)] = why
                    if entry.isdir():
                        modes[tuple(parts)] = entry.mode & _PLAIN
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
        # Only now: what is in a directory of which nobody may write has to get there first.
        for place in sorted(modes, key=len, reverse=True):
            # What came later may have taken its place, as may a link.
            with suppress(FileNotFoundError, NotADirectoryError), _directory(top, place) as found:
                os.fchmod(found, modes[place])
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"what the job left is not to be read: {error}") from error
    finally:
        os.close(top)
    return refused


def remove(directory: str | Path, names: Collection[str]) -> None:
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


def _put(top: int, parts: list[str], entry: tarfile.TarInfo, tar: tarfile.TarFile, guarded: Any) -> str:
    """Put an entry in its place; why it was left out, if it was."""
    name = parts[-1]
    with _parent(top, parts) as parent:
        if entry.isdir():
            _make_directory(parent, name)
        elif entry.issym():
            return _link(parent, parts, entry.linkname)
        elif entry.islnk():
            source = _parts(entry.linkname)
            if not source:
                raise InvalidRequest("what the job left has a link to its directory itself")
            with _parent(top, source) as other:
                if (target := _target(other, source[-1])) is not None:
                    return _link(parent, parts, target)  # of another place: it counts from there
                _unlink(parent, name)
                try:
                    os.link(
                        source[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False
                    )
                except FileNotFoundError:
                    return "another name of what was left out"
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
        else:
            _unlink(parent, name)
            return "neither a file nor a directory"
    return ""


def _link(parent: int, parts: Sequence[str], target: str) -> str:
    _unlink(parent, parts[-1])
    steps = [step for step in target.split("/") if step not in ("", ".")]
    up = next((at for at, step in enumerate(steps) if step != ".."), len(steps))
    if target.startswith("/") or up >= len(parts) or ".." in steps[up:]:
        return "a link that may lead out of the job's directory"
    os.symlink(target, parts[-1], dir_fd=parent)
    return ""


def _target(parent: int, name: str) -> str | None:
    """Where a link leads; None of anything else."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None


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
