"""A job's directory as tar streams: all of it to the guest, and the changes back.

A guest makes the stream that comes back, so no entry may lead out of the directory, whatever else the
directory contains. HTCondor follows links there, perhaps during the transfer. So each link's target
must stay inside independently of all other entries: it first goes up, at most to that directory, and
then only down.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from contextlib import contextmanager, suppress

from vmjobs.errors import InvalidRequest
from vmjobs.tar_guard import CHUNK, MAX_REJECTED, TarGuard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import IO, Any

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Mode bits that are kept: set-user-id and other special bits are not.
_MODE_BITS = 0o777


def pack(directory: str | Path, sink: IO[bytes], without: Collection[str] = ()) -> frozenset[str]:
    """Write a directory as a tar stream; returns the names in it, like ``a/b``.

    without: top-level names to omit. Also omits sockets, FIFOs and devices, and files that disappear
        meanwhile.
    """
    sent: set[str] = set()

    def select(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
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
                tar.add(os.path.join(directory, name), f"./{name}", filter=select)
    return frozenset(sent)


def unpack(stream: IO[bytes], directory: str | Path, without: Collection[str] = ()) -> dict[str, str]:
    """Unpack a tar stream over a directory; returns refused entries with the reasons.

    It refuses links that may lead out of the directory, devices and FIFOs.

    without: top-level names to leave unchanged.

    Raises:
        InvalidRequest: the stream is truncated, malformed, or has entries that no job can leave.
    """
    top = os.open(directory, _DIRECTORY)
    modes: dict[tuple[str, ...], int] = {}
    refused: dict[str, str] = {}
    try:
        guarded: Any = TarGuard(stream, max_headers=None)
        with tarfile.open(fileobj=guarded, mode="r:", errorlevel=2) as tar:
            for entry in tar:
                parts = _split_path(entry.name)
                if parts and parts[0] not in without:
                    why = _unpack_entry(top, parts, entry, tar, guarded)
                    if why and len(refused) < MAX_REJECTED:
                        refused["/".join(parts)] = why
                    if entry.isdir():
                        modes[tuple(parts)] = entry.mode & _MODE_BITS
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps all entries in memory
        # Only now: the entries of a directory without write permission must be unpacked first.
        for place in sorted(modes, key=len, reverse=True):
            # A later entry, perhaps a link, may have replaced the directory.
            with suppress(FileNotFoundError, NotADirectoryError), _open_directory(top, place) as found:
                os.fchmod(found, modes[place])
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"cannot read the files that the job left: {error}") from error
    finally:
        os.close(top)
    return refused


def remove(directory: str | Path, names: Collection[str]) -> None:
    """Remove names below a directory, as far as they exist."""
    top = os.open(directory, _DIRECTORY)
    try:
        for name in sorted(names, reverse=True):  # a directory's entries sort before it
            with suppress(OSError), _open_parent(top, parts := _split_path(name)) as parent:
                _unlink(parent, parts[-1])
    finally:
        os.close(top)


def _split_path(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidRequest(f"the job left a path outside its directory: {name[:200]!r}")
    return parts


def _open_parent(top: int, parts: Sequence[str]) -> AbstractContextManager[int]:
    return _open_directory(top, parts[:-1])


@contextmanager
def _open_directory(top: int, parts: Sequence[str]) -> Iterator[int]:
    """Open a directory below another one without following any link."""
    at = os.dup(top)
    try:
        for part in parts:
            below = os.open(part, _DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _unpack_entry(
    top: int, parts: list[str], entry: tarfile.TarInfo, tar: tarfile.TarFile, guarded: Any
) -> str:
    """Unpack one entry; returns why it was refused, or ``""``."""
    name = parts[-1]
    with _open_parent(top, parts) as parent:
        if entry.isdir():
            _make_directory(parent, name)
        elif entry.issym():
            return _make_link(parent, parts, entry.linkname)
        elif entry.islnk():
            source = _split_path(entry.linkname)
            if not source:
                raise InvalidRequest("the job left a hard link to its directory itself")
            with _open_parent(top, source) as other:
                if (target := _link_target(other, source[-1])) is not None:
                    return _make_link(parent, parts, target)  # relative to the new place
                _unlink(parent, name)
                try:
                    os.link(
                        source[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False
                    )
                except FileNotFoundError:
                    return "a hard link to a refused entry"
        elif entry.issparse():  # a few bytes may expand to a file of any size
            raise InvalidRequest(f"the job left a sparse tar entry: {entry.name[:200]!r}")
        elif entry.isreg() and (content := tar.extractfile(entry)) is not None:
            _unlink(parent, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as sink:
                with guarded.content():
                    shutil.copyfileobj(content, sink, CHUNK)
                os.fchmod(sink.fileno(), entry.mode & _MODE_BITS)
                os.utime(sink.fileno(), (entry.mtime, entry.mtime))
        else:
            _unlink(parent, name)
            return "neither a file nor a directory"
    return ""


def _make_link(parent: int, parts: Sequence[str], target: str) -> str:
    _unlink(parent, parts[-1])
    steps = [step for step in target.split("/") if step not in ("", ".")]
    up = next((at for at, step in enumerate(steps) if step != ".."), len(steps))
    if target.startswith("/") or up >= len(parts) or ".." in steps[up:]:
        return "a link that may lead out of the job's directory"
    os.symlink(target, parts[-1], dir_fd=parent)
    return ""


def _link_target(parent: int, name: str) -> str | None:
    """The target of a link; None if it is not a link."""
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
