"""The API as outside clients reach it: over TLS, and with clients that send slowly."""

from __future__ import annotations

import os
import socket
import ssl
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
import requests

from tests.kit.grid import Grid

#: More connections than the API has threads.
CLIENTS = 300


def test_a_certificate_is_checked(grid: Grid) -> None:
    assert grid.url.startswith("https://")
    assert requests.get(f"{grid.url}/healthz", timeout=30).ok
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(f"{grid.url}/healthz", timeout=30, verify="/etc/ssl/certs/ca-certificates.crt")


@pytest.mark.parametrize(
    "begin",
    [
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{",
    ],
    ids=["header", "body"],
)
def test_clients_that_never_finish_a_request_keep_no_other_waiting(grid: Grid, begin: str) -> None:
    there = urlsplit(grid.url)
    context = ssl.create_default_context(cafile=os.environ["REQUESTS_CA_BUNDLE"])
    with ExitStack() as slow:
        for _ in range(CLIENTS):
            plain = socket.create_connection((there.hostname, there.port), timeout=120)
            peer = slow.enter_context(context.wrap_socket(plain, server_hostname=there.hostname))
            peer.sendall(begin.encode())
        start = time.monotonic()
        assert grid.api.health().status == "ok"
        assert time.monotonic() - start < 30  # until the API hangs up, it takes a minute
