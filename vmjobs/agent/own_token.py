"""The token by which the service knows this node: renewed once half of its life is over."""

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

from vmjobs.durable import sync_directory
from vmjobs.errors import reason_of

log = logging.getLogger(__name__)

#: Seconds until a renewal that came to nothing is tried again.
AGAIN_SECONDS: Final = 3600.0


class OwnToken:
    """A node's token in its file, which operators may replace, too. clock: seconds since 1970."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._not_before = 0.0

    def is_due(self) -> bool:
        """Whether to ask for a new one now; it is asked for once an hour at most."""
        present = self._clock()
        if present < self._not_before or present < self._half_time():
            return False
        self._not_before = present + AGAIN_SECONDS
        if not os.access(self._path.parent, os.W_OK):
            log.warning("the node's token is not renewed: cannot write to %s", self._path.parent)
            return False
        return True

    def replace(self, token: str) -> None:
        """Keep a new one. Where that fails it is logged, and tried again."""
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

    def _half_time(self) -> float:
        """When half of its life is over, as it says itself (RFC 7519); never, if it does not say."""
        with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            part = self._path.read_text("ascii").split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
            return (float(claims["iat"]) + float(claims["exp"])) / 2
        return float("inf")
