"""The token that authenticates this node to the service, renewed at half of its life."""

from __future__ import annotations

import base64
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from vmjobs.errors import reason_of
from vmjobs.fsync import sync_directory

log = logging.getLogger(__name__)

#: Seconds from a failed renewal to the next try.
RETRY_SECONDS: Final = 3600.0


class NodeToken:
    """A node's token file, which operators may replace. clock: seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._not_before = 0.0

    def is_due(self) -> bool:
        """Whether to request a new token now; true once an hour at most."""
        current_time = self._clock()
        if current_time < self._not_before or current_time < self._renewal_time():
            return False
        self._not_before = current_time + RETRY_SECONDS
        if not os.access(self._path.parent, os.W_OK):
            log.warning("the node's token is not renewed: cannot write to %s", self._path.parent)
            return False
        return True

    def replace(self, token: str) -> None:
        """Write a new token to the file; log a failure (renewal is tried again)."""
        name = ""
        try:
            handle, name = tempfile.mkstemp(prefix=".token-", dir=self._path.parent)  # mode 0600
            with os.fdopen(handle, "w") as file:
                file.write(f"{token}\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._path)
            sync_directory(self._path.parent)
            log.info("the node has a new token")
        except OSError as error:
            log.warning("the node's token is not renewed: %s", reason_of(error))
            with suppress(OSError):
                Path(name).unlink(missing_ok=True)

    def _renewal_time(self) -> float:
        """Return the middle of the token's ``iat`` and ``exp`` (RFC 7519), or ``inf``."""
        with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            part = self._path.read_text("ascii").split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
            return (float(claims["iat"]) + float(claims["exp"])) / 2
        return float("inf")
