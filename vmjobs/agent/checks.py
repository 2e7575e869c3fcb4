"""What keeps a node from running any job, seen before one comes: account, disk, image cache, token."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shutil import disk_usage
from typing import Final

from vmjobs.model import MIB

#: Bytes that are free on a node's disk where there is room for anything.
LEAST_ROOM: Final = 64 * MIB
#: Directories of an image cache that the agent reads and writes.
_OF_A_CACHE: Final = ("", "manifests", "contents")


class Cause(StrEnum):
    """What a node takes no jobs for. JOBS: it rests, as several in a row failed."""

    ACCOUNT = "account"
    DISK = "disk"
    IMAGE_CACHE = "image_cache"
    TOKEN = "token"  # noqa: S105 - a word of a metric
    JOBS = "jobs"


@dataclass
class NodeChecks:
    """Checks that are cheap enough to be made whenever the node describes itself.

    state: the agent's directory. images: of the image cache. users: accounts as which jobs run.
    refused: why the service does not take the node's token; "": it does.
    on_change: called when ``refused`` has changed.
    """

    state: Path
    images: Path
    users: Sequence[str] = ()
    refused: str = ""
    on_change: Callable[[], object] = lambda: None

    def faults(self) -> dict[Cause, str]:
        """What is wrong now, a sentence each."""
        found = {
            Cause.ACCOUNT: lacking_account(self.users),
            Cause.DISK: lacking_room(self.state),
            Cause.IMAGE_CACHE: unusable_cache(self.images),
            Cause.TOKEN: self.refused
            and f"this node has no token that the service takes: {self.refused}",
        }
        return {cause: why for cause, why in found.items() if why}

    def note_refusal(self, why: str) -> None:
        """What the service said of the node's token; "": it took it."""
        if why != self.refused:
            self.refused = why
            self.on_change()


def lacking_account(users: Sequence[str]) -> str:
    """Why jobs cannot run as one of these accounts; "" if they can run as all."""
    for user in users:
        try:
            pwd.getpwnam(user)
        except KeyError:
            return f"this node has no account {user}, as which jobs run: make it (setting job_users)"
    return ""


def lacking_room(directory: Path) -> str:
    """Why there is no room for any job; "" if there is."""
    try:
        free = disk_usage(directory).free
    except OSError as error:
        return f"cannot look at the disk of {directory}: {error.strerror}"
    if free >= LEAST_ROOM:
        return ""
    return (
        f"the disk of {directory} has {free // MIB} MiB left, and a job needs {LEAST_ROOM // MIB}: "
        "free some"
    )


def unusable_cache(images: Path) -> str:
    """Why the agent cannot work with its image cache; "" if it can, or there is none yet."""
    for place in (images / name for name in _OF_A_CACHE):
        try:
            with os.scandir(place) as entries:
                next(entries, None)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"cannot read the image cache {place}: {error.strerror}"
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            return f"cannot write to the image cache {place}: it has to be the agent's"
    return ""
