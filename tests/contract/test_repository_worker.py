"""Real workers on real brokers: nothing is lost when either is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from repository_kit import TinyImages, one, submission

from repository.broker import Publisher
from repository.service import Repository, open_repository
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import JobState

HERE = Path(__file__).parent
DEADLINE = 60.0


def eventually(what: Callable[[], bool], seconds: float = DEADLINE) -> None:
    """Wait for a condition in another process, which has no way to tell us."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.05)


@contextmanager
def worker(config: Config, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with its clock; killed with its children at the end."""
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    queue = tmp_path / "queue"
    queue.mkdir(exist_ok=True)
    with (tmp_path / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "repository_worker.py"), str(file), str(queue)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{HERE}"},
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def placed(repository: Repository, job_id: str) -> Callable[[], bool]:
    return lambda: repository.job(job_id).condor is not None


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[tuple[Config, Repository]]:
    config = Config(data_dir=tmp_path)
    repository = open_repository(config, TinyImages(tmp_path / "images"))
    yield config, repository
    repository.close()


def test_a_worker_without_a_broker_service(embedded: tuple[Config, Repository], tmp_path: Path) -> None:
    config, repository = embedded
    publisher = Publisher(config)
    early = one(repository)
    publisher.submit_array(early.array)
    with worker(config, tmp_path) as process:
        eventually(placed(repository, early.id))
        late = repository.submit("ada", submission(), publish=publisher.submit_array).jobs[0]
        began = time.monotonic()
        eventually(placed(repository, late.id))
        assert time.monotonic() - began < 5
        os.killpg(process.pid, signal.SIGKILL)
    lost = repository.submit("ada", submission(), publish=publisher.submit_array).jobs[0]
    with worker(config, tmp_path):
        eventually(placed(repository, lost.id))
        canceled = repository.cancel(lost.id, "ada", publisher.cancel_job)
        assert canceled.state is JobState.CANCELING
        eventually(lambda: repository.job(lost.id).state is JobState.CANCELED)
    assert list((tmp_path / "broker").glob("*.taken")) == []


def test_publishing_to_nobody_fails_within_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        mute = silent.getsockname()[1]
        for port in (1, mute):
            config = Config(data_dir=tmp_path, broker_url=f"amqp://guest:guest@127.0.0.1:{port}//")
            publisher = Publisher(config)
            for ask in (publisher.ping, lambda p=publisher: p.submit_array("0" * 32)):
                began = time.monotonic()
                with pytest.raises(Unavailable) as caught:
                    ask()
                assert caught.value.service == "broker"
                assert time.monotonic() - began < 20
