"""``vmjobs serve`` as a process of its own: several workers, SQLite, files as broker."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from api.serve import STALL_SECONDS
from api.tokens import make_issuer
from api.worker import BODY_SECONDS, MAX_INCOMPLETE_CONNECTIONS
from images.content import SEGMENT_BYTES
from images.segment import decode_segment
from repository.service import open_repository
from tests.kit.processes import children, running
from tests.kit.repository_jobs import prepare_library, push_library
from tests.kit.segments import compute_layout_of_bytes
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until
from vmjobs.client import Client, JobAgentClient
from vmjobs.config import Config
from vmjobs.model import AttemptClaim, JobSpec

FEW_THREADS = "import api.serve as s; s.THREADS = 6"
SPEC = JobSpec(image="tiny", script="true", disk=1)


def prepared(folder: Path) -> Config:
    """Settings of a service whose library has one image, ``tiny``."""
    prepare_library(folder / "data", "tiny", b"disk" * 1024)
    return Config(data_dir=folder / "data", listen=f"127.0.0.1:{free_port()}", api_workers=3)


@pytest.fixture
def settings(tmp_path: Path) -> Config:
    return prepared(tmp_path)


class Service(NamedTuple):
    """A service of three processes that several tests use."""

    settings: Config
    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    settings = prepared(folder)
    with running(settings, folder / "log") as process:
        yield Service(settings, process, folder / "log")


@contextmanager
def one_process(factory: pytest.TempPathFactory, patch: str = "") -> Iterator[Config]:
    """Run a service as one process with few threads and this patch; yield its settings."""
    folder = factory.mktemp("service")
    settings = prepared(folder).model_copy(update={"api_workers": 1})
    with running(settings, folder / "log", f"{FEW_THREADS}; {patch}"):
        yield settings


@pytest.fixture(scope="module")
def few_threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    with one_process(tmp_path_factory) as settings:
        yield settings


@pytest.fixture(scope="module")
def quick_stall(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A service that gives up on stalled peers after a second, but not on its own process."""
    patch = "real = s.settings; s.settings = lambda c: real(c) | {'timeout': 60}; s.STALL_SECONDS = 1"
    with one_process(tmp_path_factory, patch) as settings:
        yield settings


@pytest.fixture(scope="module")
def quick_trickle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A service that gives up on peers that need long for a header or a body."""
    patch = "import api.worker as w; w.BODY_SECONDS = 2; w.HEADER_SECONDS = 12"
    with one_process(tmp_path_factory, patch) as settings:
        yield settings


def connected(settings: Config) -> socket.socket:
    host, port = settings.listen.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answers(settings: Config) -> None:
    """Check that the service answers a new client before its usual limits end slow connections."""
    with Client(f"http://{settings.listen}") as client:
        start = time.monotonic()
        assert client.health().status == "ok"
        assert time.monotonic() - start < min(STALL_SECONDS, BODY_SECONDS) - 15


def test_many_clients_many_processes_one_database(service: Service) -> None:
    settings = service.settings
    token = make_issuer(settings).user_token("ada")

    def work(number: int) -> str:
        with Client(f"http://{settings.listen}", token) as client:
            (job,) = client.submit(SPEC, key=f"key-{number % 20}").jobs
            assert client.job(job.id).id == job.id
            return job.id

    with ThreadPoolExecutor(16) as pool:
        jobs = list(pool.map(work, range(60)))
    assert len(set(jobs)) == 20
    with Client(f"http://{settings.listen}", token) as client:
        assert {job.id for job in client.jobs()} == set(jobs)
    assert token not in service.log.read_text()
    assert "/v1/jobs" not in service.log.read_text()
    key = settings.data_dir / "keys" / "issuer.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_killed_process_is_replaced_and_what_is_under_way_is_finished_before_the_end(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of the log, gunicorn's too, is JSON where that is wanted."""
    monkeypatch.setenv("VMJOBS_LOG_FORMAT", "json")
    token = make_issuer(settings).user_token("ada")
    digest = "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    with running(settings, tmp_path / "log") as process:
        before = children(process)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(children(process)) == 3 and children(process) != before)
        answers(settings)
        with connected(settings) as slow:
            head = f"PUT /v1/blobs/{digest} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            slow.sendall(f"{head}Authorization: Bearer {token}\r\n\r\nf".encode())
            spool = settings.data_dir / "spool"
            wait_until(lambda: spool.is_dir() and any(spool.iterdir()))
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: len(children(process)) == 1)  # the idle workers have exited
            slow.sendall(b"oo")
            assert slow.recv(100).startswith(b"HTTP/1.1 201")
        assert process.wait(90) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"api.serve", "gunicorn.error"} <= {line["logger"] for line in lines}


def test_hostile_requests_do_no_harm(service: Service) -> None:
    for request in (
        b"GET /v1/jobs/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\r\n" * 1000,
    ):
        with connected(service.settings) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while data := connection.recv(65536):
                answer += data
        assert b" 200 " not in answer.split(b"\r\n", 1)[0]
        assert b"root:" not in answer
        assert b"Traceback" not in answer
    answers(service.settings)
    assert len(children(service.process)) == 3


@pytest.mark.parametrize("kind", ["quick_stall", "quick_trickle"])
def test_slow_bodies_do_not_keep_others_waiting(request: pytest.FixtureRequest, kind: str) -> None:
    """More connections than threads; each sends no more of its body, or a few bytes at a time."""
    settings: Config = request.getfixturevalue(kind)
    token = make_issuer(settings).user_token("ada")
    head = f"PUT /v1/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
    head += f"Authorization: Bearer {token}\r\n\r\nf"
    with ExitStack() as slow, ThreadPoolExecutor(1) as pool:
        peers = [slow.enter_context(connected(settings)) for _ in range(9)]
        start = time.monotonic()
        for peer in peers:
            peer.sendall(head.encode())
        answered = pool.submit(answers, settings)
        while not answered.done() and kind == "quick_trickle":
            for peer in peers:
                with suppress(OSError):
                    peer.sendall(b"o")
            time.sleep(0.1)
        answered.result()
        assert time.monotonic() - start > 0.5, "no thread was free until then"


def test_bodies_of_refused_requests_keep_nobody_waiting(few_threads: Config) -> None:
    """The senders have no token, and the API reads none of their bodies."""
    head = "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{"
    with ExitStack() as slow:
        peers = [slow.enter_context(connected(few_threads)) for _ in range(60)]
        for peer in peers:
            peer.sendall(head.encode())
        answers(few_threads)
        assert all(peer.recv(64).startswith(b"HTTP/1.1 401 ") for peer in peers)


def test_headers_that_trickle_in_take_nobodys_thread(quick_trickle: Config) -> None:
    """From many more clients than there are threads, all without a token."""
    with ExitStack() as slow:
        peers = [slow.enter_context(connected(quick_trickle)) for _ in range(200)]
        for peer in peers:
            peer.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nA: ")
        with Client(f"http://{quick_trickle.listen}") as client:
            for peer in peers[-MAX_INCOMPLETE_CONNECTIONS:]:
                peer.sendall(b"a")
            start = time.monotonic()
            assert client.health().status == "ok"
            assert time.monotonic() - start < 10, "not when others have been given up"
        last = peers[-1]
        last.sendall(b"a\r\n\r\n")
        assert last.recv(64).startswith(b"HTTP/1.1 401 ")
        for peer in peers[:-1]:
            with suppress(ConnectionResetError):
                while data := peer.recv(4096):
                    assert data.startswith(b"HTTP/1.1 400 "), "it is not served"
        assert time.monotonic() - start < STALL_SECONDS - 15


def test_peers_that_take_nothing_do_not_keep_others_waiting(quick_stall: Config) -> None:
    """The kernel itself sends segments; it gives up on such peers, too."""
    with closing(open_repository(quick_stall, migrate=False)) as repository:
        data = os.urandom(SEGMENT_BYTES)
        image = push_library(repository, "large", data)
    host, port = quick_stall.listen.split(":")
    token = make_issuer(quick_stall).user_token("ada")
    digest = compute_layout_of_bytes(data).segments[0].hex()
    head = f"GET /v1/images/{image.digest}/segments/{digest} HTTP/1.1\r\nHost: x\r\n"
    head += f"Authorization: Bearer {token}\r\n\r\n"
    with ExitStack() as silent:
        for _ in range(20):
            peer = silent.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect((host, int(port)))
            peer.sendall(head.encode())
        answers(quick_stall)


def test_busy_connections_take_turns(few_threads: Config) -> None:
    """Twice as many connections as there are threads; each always has another request."""
    turns = [0] * 12
    over = time.monotonic() + 240
    together = threading.Barrier(len(turns))

    def ask(number: int) -> None:
        with closing(http.client.HTTPConnection(few_threads.listen, timeout=120)) as connection:
            connection.connect()
            together.wait()
            while min(turns) < 50 and time.monotonic() < over:
                connection.request("GET", "/v1/service-info")
                assert connection.getresponse().read()
                turns[number] += 1

    with ThreadPoolExecutor(len(turns)) as pool:
        list(pool.map(ask, range(len(turns))))
    assert min(turns) >= 50
    # Not just as many: on a busy host, some threads run less.
    assert max(turns) <= 20 * min(turns), "threads stayed with their connections, others stood in line"


def test_ranges_of_segments_over_one_connection(service: Service) -> None:
    """Each answer is as long as announced, so that the next one starts in the right place."""
    settings, data = service.settings, os.urandom(SEGMENT_BYTES)
    with closing(open_repository(settings, migrate=False)) as repository:
        image = push_library(repository, "large", data)
    segment = compute_layout_of_bytes(data).segments[0]
    path = f"/v1/images/{image.digest}/segments/{segment.hex()}"
    headers = {"Authorization": f"Bearer {make_issuer(settings).node_token('wn1')}"}
    with closing(http.client.HTTPConnection(settings.listen, timeout=60)) as connection:

        def get(span: str = "") -> tuple[int, bytes, str | None]:
            wanted = {"Range": f"bytes={span}"} if span else {}
            connection.request("GET", path, headers={**headers, **wanted})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader("Connection")

        status, whole, kept = get()
        assert (status, decode_segment(whole, segment), kept) == (200, data, "keep-alive")
        socket_before = connection.sock
        for start, stop in ((0, 1), (5, 70000), (1 << 20, 3 << 20), (len(whole) - 3, len(whole))):
            for _ in range(2):
                assert get(f"{start}-{stop - 1}") == (206, whole[start:stop], "keep-alive")
        assert get(f"{len(whole)}-")[0] == 416
        assert get() == (200, whole, "keep-alive")
        assert connection.sock is socket_before


def peak_memory(pid: int) -> int:
    """The peak memory of a process, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_large_files_pass_without_being_held_in_memory(service: Service, tmp_path: Path) -> None:
    source = tmp_path / "large"
    with source.open("wb") as file:
        for number in range(200):
            file.write(number.to_bytes(4, "big") * (1 << 18))
    before = {pid: peak_memory(pid) for pid in children(service.process)}
    issuer, url = make_issuer(service.settings), f"http://{service.settings.listen}"
    with Client(url, issuer.user_token("bob")) as client:
        large = client.upload_input(source)
        spec = SPEC.model_copy(update={"inputs": (large,), "disk": 300})
        (job,) = client.submit(spec).jobs
    agent = JobAgentClient(url, issuer.job_token(job.id, "bob"), job.id)
    agent.claim(AttemptClaim(attempt="a" * 32, node="wn1"))
    with (tmp_path / "copy").open("wb") as sink:
        agent.fetch_input(large, sink)
    agent.close()
    assert (tmp_path / "copy").stat().st_size == large.size == 200 << 20
    assert all(peak_memory(pid) < before[pid] + 40 * 1024 for pid in before)
