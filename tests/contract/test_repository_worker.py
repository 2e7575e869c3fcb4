"""Real workers on real brokers: nothing is lost when either is killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from repository import broker
from repository.broker import TaskPublisher
from repository.service import Repository, open_repository
from tests.kit.repository_jobs import one, prepare_library, submission
from tests.kit.sockets import free_ports
from tests.kit.waiting import wait_until
from tests.kit.workers import worker
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import Job, JobState


def placed(repository: Repository, job_id: str) -> Callable[[], bool]:
    return lambda: repository.jobs.get(job_id).condor is not None


def sent(repository: Repository, publisher: TaskPublisher, key: str = "") -> Job:
    """Submit a job, and have a worker told of it."""
    return repository.submissions.submit("ada", submission(), key, publisher.submit_array).jobs[0]


RABBITMQ = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))


class Rabbit:
    """A RabbitMQ server of the test, with all its files in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port, self._peers, self._names = free_ports(3)
        self._process: subprocess.Popen[bytes] | None = None

    def certify(self) -> Path:
        """Make a self-signed certificate; return its file."""
        path = self.root / "server.pem"
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-subj", "/CN=test"]
        named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", self.root / "server.key"]
        command = ["openssl", "req", "-x509", *key, *named, "-out", path]
        subprocess.run(command, check=True, capture_output=True)
        return path

    def start(self) -> None:
        (self.root / "env").touch()
        (self.root / "rabbitmq.conf").write_text(
            f"listeners.tcp = none\nlisteners.ssl.default = 127.0.0.1:{self.port}\n"
            f"ssl_options.certfile = {self.root}/server.pem\n"
            f"ssl_options.keyfile = {self.root}/server.key\nssl_options.verify = verify_none\n"
        )
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "ERL_EPMD_PORT": str(self._names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._peers),
            "RABBITMQ_MNESIA_BASE": str(self.root / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.root / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.root / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.root / "env"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.root / "plugins"),
            "RABBITMQ_PID_FILE": str(self.root / "pid"),
        }
        with (self.root / "out").open("ab") as out:
            self._process = subprocess.Popen(
                [str(RABBITMQ[-1])], stdout=out, stderr=out, env=environment, start_new_session=True
            )
        wait_until(lambda: listens(self.port), 180)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            wait_until(lambda: not listens(self.port))
            self._process = None

    def close(self) -> None:
        self.kill()
        mapper = shutil.which("epmd")
        assert mapper is not None
        environment = {**os.environ, "ERL_EPMD_PORT": str(self._names)}
        subprocess.run([mapper, "-kill"], env=environment, check=False, capture_output=True)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def rabbit(tmp_path: Path) -> Iterator[Rabbit]:
    assert RABBITMQ, "rabbitmq-server is not installed"
    (tmp_path / "rabbit").mkdir()
    server = Rabbit(tmp_path / "rabbit")
    server.certify()
    server.start()
    yield server
    server.close()


def test_a_broker_that_is_killed_and_comes_back(
    rabbit: Rabbit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CONNECT_SECONDS", "ANSWER_SECONDS"):  # a broker that has just started is slow
        monkeypatch.setattr(broker, limit, 60)
    url = f"amqps://guest:guest@127.0.0.1:{rabbit.port}//"
    config = Config(data_dir=tmp_path, broker_url=url, broker_ca=rabbit.root / "server.pem")
    prepare_library(tmp_path)
    repository = open_repository(config, migrate=False)
    publisher = TaskPublisher(config)
    publisher.ping()
    with pytest.raises(Unavailable):  # the system does not trust its certificate
        TaskPublisher(config.model_copy(update={"broker_ca": None})).ping()
    with worker(config, tmp_path) as process:
        first = sent(repository, publisher)
        wait_until(placed(repository, first.id))
        rabbit.kill()
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            sent(repository, publisher, "key")
        assert caught.value.service == "broker"
        assert time.monotonic() - began < 30
        assert len(repository.jobs.page("ada").jobs) == 1
        rabbit.start()
        second = sent(repository, publisher, "key")
        wait_until(placed(repository, second.id), 180)
        repository.job_actions.cancel(second.id, "ada", publisher.change_jobs)
        # CANCELED needs beat's `track`, so beat survives, too.
        wait_until(lambda: repository.jobs.get(second.id).state is JobState.CANCELED)
        assert process.poll() is None
    publisher.close()
    repository.close()


def test_a_worker_without_a_broker_service(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path)
    prepare_library(tmp_path)
    publisher = TaskPublisher(config)
    with closing(open_repository(config, migrate=False)) as repository:
        early = one(repository)
        publisher.submit_array(early.array)
        with worker(config, tmp_path) as process:
            wait_until(placed(repository, early.id))
            late = sent(repository, publisher)
            began = time.monotonic()
            wait_until(placed(repository, late.id))
            assert time.monotonic() - began < 20  # the sweep, every 30 s, would find it as well
            os.killpg(process.pid, signal.SIGKILL)
        left = taken(tmp_path)  # it may have died just then
        lost = sent(repository, publisher)
        with worker(config, tmp_path):
            wait_until(placed(repository, lost.id))
            canceled = repository.job_actions.cancel(lost.id, "ada", publisher.change_jobs)
            assert canceled.state is JobState.CANCELING
            wait_until(lambda: repository.jobs.get(lost.id).state is JobState.CANCELED)
            wait_until(lambda: taken(tmp_path) <= left, what="messages that were read to be gone")


def taken(data_dir: Path) -> set[str]:
    """Messages that a worker is reading, or was when it was killed."""
    return {path.name for path in (data_dir / "broker").glob("*.taken")}


def test_publishing_to_nobody_fails_within_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent, ThreadPoolExecutor(4) as pool:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        began = time.monotonic()
        asked = []
        for port in (1, silent.getsockname()[1]):
            config = Config(data_dir=tmp_path, broker_url=f"amqp://guest:guest@127.0.0.1:{port}//")
            asked.append(pool.submit(TaskPublisher(config).ping))
            asked.append(pool.submit(TaskPublisher(config).submit_array, "0" * 32))
        for ask in asked:
            with pytest.raises(Unavailable) as caught:
                ask.result()
            assert caught.value.service == "broker"
        assert time.monotonic() - began < 60
