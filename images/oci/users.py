"""Look up the user that a container runs as, in the same way as container engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from images.build.tree import FileTree
from vmjobs.errors import BuildError, ImageRejected

_MAX_FILE: Final = 4 * 1024 * 1024
_MAX_ID: Final = 2**31 - 1


@dataclass(frozen=True)
class ContainerUser:
    """A user of the image. groups: supplementary ones, including the primary one."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = (0,)
    home: str = "/"


def look_up_user(tree: FileTree, user: str) -> ContainerUser:
    """The user that ``NAME``, ``UID``, ``NAME:GROUP`` or ``UID:GID`` means in the image.

    A number need not be in the image's files. An explicit group is the only one.

    Raises:
        ImageRejected: there is no such user or group.
    """
    name, _, group = user.partition(":")
    entry = _user(tree, name)
    if entry is None and name and not name.isdecimal():
        raise ImageRejected(f"the container runs as user {name!r}, which is not in its /etc/passwd")
    known, uid, gid, home = entry or ("", int(name or 0), 0, "/")
    more: list[int] = []
    if group:
        gid = _group(tree, group)
    elif known:
        more = [number for _, number, members in _groups(tree) if known in members]
    if max(uid, gid, *more) > _MAX_ID:
        raise ImageRejected(f"the container runs as user {user!r}, whose number is too large")
    return ContainerUser(uid, gid, tuple(dict.fromkeys((gid, *more))), home or "/")


def _user(tree: FileTree, name: str) -> tuple[str, int, int, str] | None:
    wanted = name or "0"
    for fields in _lines(tree, "etc/passwd"):
        if len(fields) < 6 or not fields[2].isdecimal() or not fields[3].isdecimal():
            continue
        found = int(fields[2]) == int(wanted) if wanted.isdecimal() else fields[0] == wanted
        if found:
            return fields[0], int(fields[2]), int(fields[3]), fields[5]
    return None


def _group(tree: FileTree, group: str) -> int:
    for name, number, _ in _groups(tree):
        if number == int(group) if group.isdecimal() else name == group:
            return number
    if group.isdecimal():
        return int(group)
    raise ImageRejected(f"the container runs in group {group!r}, which is not in its /etc/group")


def _groups(tree: FileTree) -> Iterator[tuple[str, int, list[str]]]:
    for fields in _lines(tree, "etc/group"):
        if len(fields) >= 3 and fields[2].isdecimal():
            members = fields[3].split(",") if len(fields) > 3 else []
            yield fields[0], int(fields[2]), members


def _lines(tree: FileTree, path: str) -> Iterator[list[str]]:
    try:
        content = tree.file(path)
    except BuildError:
        return
    if content.size > _MAX_FILE:
        raise ImageRejected(f"the container's /{path} has {content.size} bytes")
    for line in content.read().decode("utf-8", "surrogateescape").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip().split(":")
