"""Checks of a node before any job arrives: account, disk, image cache, token."""

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

#: The fewest free bytes on the node's disk with which it takes jobs.
MIN_FREE_BYTES: Final = 64 * MIB
#: Directories of an image cache that the agent reads and writes.
_CACHE_DIRECTORIES: Final = ("", "manifests", "contents")


class FaultCause(StrEnum):
    """Why a node takes no jobs. JOBS: it pauses because several jobs in a row failed."""

    ACCOUNT = "account"
    DISK = "disk"
    IMAGE_CACHE = "image_cache"
    TOKEN = "token"  # noqa: S105 - a word of a metric
    JOBS = "jobs"


@dataclass
class NodeChecks:
    """Checks that are cheap enough to run each time the node describes itself.

    state: the agent's directory. images: the image cache's. users: accounts as which jobs run.
    token_fault: why the service rejects the node's token; "": it accepts it.
    on_change: called when ``token_fault`` has changed.
    """

    state: Path
    images: Path
    users: Sequence[str] = ()
    token_fault: str = ""
    on_change: Callable[[], object] = lambda: None

    def faults(self) -> dict[FaultCause, str]:
        """Return the present faults, a sentence each."""
        found = {
            FaultCause.ACCOUNT: account_fault(self.users),
            FaultCause.DISK: disk_fault(self.state),
            FaultCause.IMAGE_CACHE: image_cache_fault(self.images),
            FaultCause.TOKEN: self.token_fault
            and f"the service rejects this node's token: {self.token_fault}",
        }
        return {cause: why for cause, why in found.items() if why}

    def note_token_fault(self, why: str) -> None:
        """Note why the service rejects the node's token; "": it accepts it."""
        if why != self.token_fault:
            self.token_fault = why
            self.on_change()


def account_fault(users: Sequence[str]) -> str:
    """Return why jobs cannot run as one of these accounts; "" if they can run as all."""
    for user in users:
        try:
            pwd.getpwnam(user)
        except KeyError:
            return f"this node has no account {user} for jobs: create it (setting job_users)"
    return ""


def disk_fault(directory: Path) -> str:
    """Return why the disk has no room for a job; "" if it has."""
    try:
        free = disk_usage(directory).free
    except OSError as error:
        return f"cannot read the free space of the disk of {directory}: {error.strerror}"
    if free >= MIN_FREE_BYTES:
        return ""
    return (
        f"the disk of {directory} has {free // MIB} MiB free "
        f"(at least {MIN_FREE_BYTES // MIB} are needed): free some space"
    )


def image_cache_fault(images: Path) -> str:
    """Return why the agent cannot use its image cache; "" if it can, or has none yet."""
    for place in (images / name for name in _CACHE_DIRECTORIES):
        try:
            with os.scandir(place) as entries:
                next(entries, None)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"cannot read the image cache {place}: {error.strerror}"
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            return f"cannot write to the image cache {place}: make the agent's user its owner"
    return ""
