"""``vmjobs serve`` as a separate process that tests talk to and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.cli import VMJOBS
from tests.kit.waiting import wait_until
from vmjobs.client import Client, Retries
from vmjobs.config import Config

#: Runs the program ``vmjobs`` as it is after other statements.
MAIN = "from vmjobs.cli.main import main; main()"


@contextmanager
def running(config: Config, log: Path, patch: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run the service as a process; yields it when it is ready. patch: statements that run before."""
    environ = {
        **os.environ,
        "VMJOBS_DATA_DIR": str(config.data_dir),
        "VMJOBS_LISTEN": config.listen,
        "VMJOBS_API_WORKERS": str(config.api_workers),
        "VMJOBS_STORAGE_URL": config.storage_url,
        "VMJOBS_IMAGE_QUOTA": str(config.image_quota),
        "VMJOBS_CONFIG": "/dev/null",
    }
    if config.image_trust_dir is not None:
        environ["VMJOBS_IMAGE_TRUST_DIR"] = str(config.image_trust_dir)
    with log.open("wb") as sink:
        program = [sys.executable, "-c", f"{patch}\n{MAIN}"] if patch else [VMJOBS]
        process = subprocess.Popen([*program, "serve"], env=environ, stderr=sink, stdout=sink)
    try:
        with Client(f"http://{config.listen}", retries=Retries(deadline=240, ceiling=0.2)) as client:
            wait_until(lambda: client.health().status == "ok", 240)
        wait_until(lambda: len(children(process)) == config.api_workers)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]
