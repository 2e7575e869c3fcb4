"""A repository's worker in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit import KIT, ROOT
from vmjobs.config import Config

DEADLINE = 60.0


@contextmanager
def worker(config: Config, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with Celery beat; killed with its children at the end."""
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    queue = tmp_path / "queue"
    queue.mkdir(exist_ok=True)
    with (tmp_path / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(KIT / "repository_worker.py"), str(file), str(queue)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
