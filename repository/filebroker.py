"""A message broker without a server: kombu's file transport, with atomic writes.

kombu writes a message in place, so that a consumer may read it half written; here a message appears
by a rename. A message that a worker had taken when it was killed is lost: the worker's sweep
dispatches again what still waits.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from pathlib import Path
from queue import Empty
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import filesystem

logger = logging.getLogger(__name__)


class Channel(filesystem.Channel):
    """One connection's view of the folder."""

    def _put(self, queue: str, message: Any, **_: Any) -> None:  # type: ignore[override]
        folder = Path(self.data_folder_out)
        name = f"{time.time_ns():020d}_{uuid.uuid4().hex}.{queue}.msg"
        try:
            temp = folder / f"{name}.new"
            temp.write_text(json.dumps(message), "utf-8")
            temp.replace(folder / name)
        except OSError as error:
            raise ChannelError(f"cannot write the message {name}: {error.strerror}") from error

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        del timeout
        folder = Path(self.data_folder_in)
        waiting = (p for p in folder.iterdir() if p.name.partition(".")[2] == f"{queue}.msg")
        for path in sorted(waiting):
            taken = path.with_name(f"{path.name}.{uuid.uuid4().hex}.taken")
            try:
                path.rename(taken)
            except FileNotFoundError:
                continue  # another worker took it first
            try:
                return json.loads(taken.read_bytes())
            except ValueError:
                logger.error("message %s is not JSON and was dropped", path.name)
            finally:
                taken.unlink(missing_ok=True)
        raise Empty


class Transport(filesystem.Transport):
    """The transport that ``broker_settings`` names."""

    Channel = Channel


def clean(folder: Path, age: float = 3600.0) -> int:
    """Remove temporary files of killed processes that are older than ``age`` seconds."""
    removed = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if path.suffix in {".new", ".taken"} and time.time() - path.stat().st_mtime > age:
                path.unlink()
                removed += 1
        except FileNotFoundError:
            continue
    return removed
