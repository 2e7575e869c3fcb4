"""The guest program's own requests, to a server on this host."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

GUEST = Path(__file__).parents[2] / "images" / "guest"
REQUEST = """
. "$lib/base.sh"; . "$lib/http.sh"
http main GET "$1"
echo "$? $http_status"
"""


@dataclass
class Host:
    """A guest's host. taken: bytes that it sent. busy: the server answers once it is set."""

    taken: bytearray = field(default_factory=bytearray)
    busy: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def ask(self, path: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", REQUEST, "sh", path], env=self.environment, stdout=subprocess.PIPE, text=True
        )

    @property
    def environment(self) -> dict[str, str]:
        known = {"VMJOBS_ENDPOINT": self.address, "VMJOBS_TOKEN": "secret", "lib": str(GUEST)}
        return {**os.environ, **known}


@pytest.fixture
def host() -> Iterator[Host]:
    """A server that answers with the status in the request's path."""
    made = Host()
    made.busy.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.set()
            made.busy.wait(240)
            status = int(self.path[1:]) if self.headers["Authorization"] == "Bearer secret" else 401
            self.send_response(status)
            self.end_headers()
            if status != 204:
                self.wfile.write(b"told ")

        def do_POST(self) -> None:
            made.asked.set()
            made.busy.wait(240)
            (offset,) = parse_qs(urlsplit(self.path).query)["offset"]
            data = self.rfile.read(int(self.headers["Content-Length"]))
            assert int(offset) <= len(made.taken), "there would be a gap"
            made.taken[int(offset) :] = data
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield made
        made.busy.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "seen"),
    [
        (200, "told 0 200"),
        (204, "0 200"),
        (401, "2 401"),
        (413, "2 413"),
        (429, "1 429"),
        (503, "1 503"),
        (599, "1 000"),
    ],
)
def test_a_guest_knows_whether_to_ask_again(host: Host, status: int, seen: str) -> None:
    assert host.ask(f"/{status}").communicate(timeout=120)[0] == f"{seen}\n"


def test_a_request_that_a_signal_has_ended_is_not_refused(host: Host) -> None:
    """As if the signal were sent to all of the script's processes."""
    host.busy.clear()
    asking = host.ask("/200")
    assert host.asked.wait(120)
    children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGUSR1)
    assert asking.communicate(timeout=120)[0] == "1 000\n"


def test_what_is_printed_survives_its_carrier(host: Host, tmp_path: Path) -> None:
    """The carrier is killed repeatedly while the host is slow and the script goes on."""
    source, sink = os.pipe()
    said = os.urandom(3_000_000)

    def carrier() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [GUEST / "talk", "carry", "out"],
            stdin=source,
            env={**host.environment, "run": str(tmp_path)},
        )

    def script() -> None:
        with os.fdopen(sink, "wb") as out:
            out.write(said)

    printing = threading.Thread(target=script)
    printing.start()
    for _ in range(10):
        host.asked.clear()
        carrying = carrier()
        host.asked.wait(30)
        carrying.kill()
        carrying.wait(60)
    last = carrier()
    assert last.wait(240) == 0
    printing.join()
    os.close(source)
    assert bytes(host.taken) == said
    assert (tmp_path / "out.over").exists()
