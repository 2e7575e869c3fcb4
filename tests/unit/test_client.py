"""The client: its retries and timeouts against real sockets that misbehave, and its tokens."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate

import pytest

from tests.kit.http_server import Handler, Scripted
from vmjobs import errors
from vmjobs.client import ApiTransport, Client, CondorJobClient, JobAgentClient, Retries
from vmjobs.client.request_bodies import FileBody
from vmjobs.client.transport import retry_after
from vmjobs.model import JobSpec, StreamName

QUICK = Retries(deadline=3.0, first=0.01, ceiling=0.05, connect=1.0, read=1.0)
BYTES = bytes(range(256)) * 4096
NO_URLS = ("", "localhost:8080", "ftp://x", "http://", "http://x:99999", "http://[", "http://x/?a=b")


def http(server: Scripted, retries: Retries = QUICK) -> ApiTransport:
    return ApiTransport(server.url, "secret", retries=retries)


def fails_until(number: int, status: int) -> Callable[[Handler, int], None]:
    def script(handler: Handler, call: int) -> None:
        handler.answer(200 if call >= number else status)

    return script


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
def test_passing_failures_are_tried_again(server: Scripted, method: str, status: int) -> None:
    server.script = fails_until(3, status)
    assert http(server).call(method, "/x", body=b"abc").status_code == 200
    assert len(server.seen) == 3
    assert {call.headers["Authorization"] for call in server.seen} == {"Bearer secret"}


def test_a_call_that_is_tried_again_for_long_is_told_once(server: Scripted) -> None:
    server.script = fails_until(12, 503)
    told: list[str] = []
    retries = replace(QUICK, on_wait=lambda error, _left: told.append(error.code), quiet=0.1)
    assert http(server, retries).call("GET", "/x").status_code == 200
    assert told == ["UNAVAILABLE"]
    http(server, retries).call("GET", "/x")
    assert told == ["UNAVAILABLE"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500, 501])
def test_lasting_failures_are_not(server: Scripted, status: int) -> None:
    server.script = lambda handler, _: handler.answer(status)
    with pytest.raises(errors.VMJobsError):
        http(server).call("GET", "/x")
    assert len(server.seen) == 1


def test_a_post_is_tried_again_only_where_that_is_safe(server: Scripted) -> None:
    server.script = fails_until(2, 503)
    with pytest.raises(errors.Unavailable):
        http(server).call("POST", "/x", body=b"a")
    assert len(server.seen) == 1
    assert http(server).call("POST", "/x", body=b"a", repeatable=True).status_code == 200


def test_submission_always_has_a_key_and_keeps_it(server: Scripted) -> None:
    server.script = lambda handler, _: handler.answer(503)
    spec = JobSpec(image="tiny", script="true")
    with pytest.raises(errors.Unavailable):
        Client(server.url, retries=Retries(deadline=0.3, first=0.01)).submit(spec)
    keys = {call.headers["Idempotency-Key"] for call in server.seen}
    assert len(server.seen) > 1
    assert len(keys) == 1
    assert len(keys.pop()) == 32


def test_broken_connection_is_tried_again(server: Scripted) -> None:
    server.script = lambda handler, call: handler.hang_up() if call < 3 else handler.answer(200)
    assert http(server).call("GET", "/x").status_code == 200


def test_retry_after_is_honoured(server: Scripted) -> None:
    def script(handler: Handler, call: int) -> None:
        handler.answer(200) if call > 1 else handler.answer(503, Retry_After="1")

    server.script = script
    start = time.monotonic()
    http(server).call("GET", "/x")
    assert 1.0 <= time.monotonic() - start < 10


def test_waiting_longer_than_the_deadline_is_not_begun(server: Scripted) -> None:
    server.script = lambda handler, _: handler.answer(503, Retry_After="3600")
    start = time.monotonic()
    with pytest.raises(errors.Unavailable):
        http(server).call("GET", "/x")
    assert time.monotonic() - start < 10


def test_retry_after_forms() -> None:
    assert retry_after("7") == 7
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 61
    assert retry_after(formatdate(time.time() - 60, usegmt=True)) == 0
    for bad in (None, "", "soon", "-5", "1e9", "²"):
        assert retry_after(bad) == 0


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(errors.Unavailable, match="Connection refused") as caught:
            ApiTransport(url, retries=Retries(deadline=0.5, first=0.05)).call("GET", "/x")
    assert caught.value.service == "api"
    assert caught.value.hint
    assert 0.1 < time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("url", "token", "kind", "why"),
    [(url, "", errors.ConfigError, "not the URL") for url in NO_URLS]
    + [
        ("http://x", token, errors.Unauthenticated, "non-ASCII characters")
        for token in ("a b", "a\nb", "t\u00f6ken")
    ],
)
def test_what_is_no_url_or_token_is_told_at_once(
    url: str, token: str, kind: type[errors.VMJobsError], why: str
) -> None:
    with pytest.raises(kind, match=why):
        ApiTransport(url, token)


def test_silence_times_out(server: Scripted) -> None:
    released = threading.Event()
    server.script = lambda handler, _: (released.wait(10), handler.hang_up())[-1]
    start = time.monotonic()
    with pytest.raises(errors.Unavailable, match="no answer in time"):
        http(server, Retries(deadline=1.0, read=0.3)).call("GET", "/x")
    released.set()
    assert time.monotonic() - start < 10


def test_close_ends_the_waiting(server: Scripted) -> None:
    server.script = lambda handler, _: handler.answer(503)
    transport = http(server, Retries(deadline=60, first=30, ceiling=30))
    timer = threading.Timer(0.2, transport.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(errors.Unavailable, match="closed"):
        transport.call("GET", "/x")
    assert time.monotonic() - start < 20


def test_neither_redirects_are_followed_nor_other_services_taken_for_ours(server: Scripted) -> None:
    server.script = lambda handler, _: handler.answer(302, Location="http://evil.example.org/")
    with pytest.raises(errors.Unavailable, match="redirect"):
        http(server).call("GET", "/x")
    server.script = lambda handler, _: handler.answer(200, b"<html>hello</html>")
    with pytest.raises(errors.Unavailable, match="answered in another format"):
        Client(server.url).job("1")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "UNAUTHENTICATED", errors.Unauthenticated),
        (403, "FORBIDDEN", errors.Forbidden),
        (404, "NOT_FOUND", errors.NotFound),
        (409, "CONFLICT", errors.Conflict),
        (409, "JOB_FINAL", errors.JobFinal),
        (409, "ATTEMPT_SUPERSEDED", errors.AttemptSuperseded),
        (409, "IDEMPOTENCY_CONFLICT", errors.IdempotencyConflict),
        (409, "NEW_KIND_OF_CONFLICT", errors.Conflict),
        (413, "TOO_LARGE", errors.PayloadTooLarge),
        (422, "INVALID_SPEC", errors.InvalidSpec),
        (422, "DIGEST_MISMATCH", errors.DigestMismatch),
    ],
)
def test_problems_become_our_errors(
    server: Scripted, status: int, code: str, kind: type[errors.VMJobsError]
) -> None:
    fault = {"field": "cpus", "code": "bad", "message": "too many"}
    server.script = lambda handler, _: handler.problem(status, code, hint="do so", errors=[fault])
    with pytest.raises(kind) as caught:
        http(server).call("GET", "/x")
    error = caught.value
    assert type(error) is kind
    assert (error.code, error.message, error.hint) == (code, "so it is", "do so")
    assert [(f.field, f.message) for f in error.faults] == [("cpus", "too many")]


def test_a_service_that_is_away_is_named_and_incidents_are_passed_on(server: Scripted) -> None:
    server.script = lambda handler, _: handler.problem(503, "UNAVAILABLE", service="broker")
    with pytest.raises(errors.Unavailable) as caught:
        http(server, Retries(deadline=0.1)).call("GET", "/x")
    assert caught.value.service == "broker"
    server.script = lambda handler, _: handler.problem(500, "INTERNAL", hint="report it")
    with pytest.raises(errors.VMJobsError, match="so it is") as incident:
        http(server).call("GET", "/x")
    assert incident.value.hint == "report it"


def flaky_file(handler: Handler, _: int) -> None:
    """Serve ranges of BYTES, a third at a time, and close the connection after each."""
    start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(BYTES) - start))
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(BYTES) - 1}/{len(BYTES)}")
    handler.end_headers()
    handler.wfile.write(BYTES[start : start + len(BYTES) // 3])
    handler.wfile.flush()
    handler.hang_up()


def test_download_goes_on_where_it_broke(server: Scripted) -> None:
    server.script = flaky_file
    sink, steps = io.BytesIO(), []
    digest = f"sha256:{hashlib.sha256(BYTES).hexdigest()}"
    size = http(server).download(
        "/x", sink.write, digest=digest, progress=lambda done, total: steps.append((done, total))
    )
    assert (size, sink.getvalue()) == (len(BYTES), BYTES)
    assert len(server.seen) == 4
    assert steps == sorted(steps)
    assert steps[-1] == (len(BYTES), len(BYTES))


def test_download_from_a_server_without_ranges(server: Scripted) -> None:
    def script(handler: Handler, call: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(BYTES)))
        handler.end_headers()
        handler.wfile.write(BYTES if call > 1 else BYTES[:300_000])
        handler.wfile.flush()
        if call == 1:
            handler.hang_up()

    server.script = script
    sink = io.BytesIO()
    http(server).download("/x", sink.write)
    assert sink.getvalue() == BYTES


def test_download_that_makes_no_progress_ends(server: Scripted) -> None:
    def script(handler: Handler, _: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.hang_up()

    server.script = script
    with pytest.raises(errors.Unavailable, match="cannot read"):
        http(server, Retries(deadline=0.3, first=0.05)).download("/x", io.BytesIO().write)


def test_download_of_other_bytes(server: Scripted) -> None:
    server.script = lambda handler, _: handler.answer(200, b"evil")
    with pytest.raises(errors.DigestMismatch):
        http(server).download("/x", io.BytesIO().write, digest="sha256:" + "0" * 64)


def test_upload_begins_anew_with_every_try(server: Scripted) -> None:
    server.script = fails_until(3, 503)
    source = io.BytesIO(b"skip" + BYTES)
    source.seek(4)
    steps: list[tuple[int, int]] = []
    body = FileBody(source, len(BYTES), lambda done, total: steps.append((done, total)))
    http(server).call("PUT", "/x", body=body)
    assert [call.body for call in server.seen] == [BYTES] * 3
    assert steps[-1] == (len(BYTES), len(BYTES))
    http(server).call("PUT", "/x", body=FileBody(io.BytesIO(), 0))
    assert server.seen[-1].headers["Content-Length"] == "0"


def test_upload_of_what_passes_once_is_not_repeated(server: Scripted) -> None:
    server.script = lambda handler, _: handler.answer(503)
    reader, writer = os.pipe()
    os.write(writer, bytes(10))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe, pytest.raises(errors.Unavailable):
        http(server).call("PUT", "/x", body=FileBody(pipe, 5))
    assert len(server.seen) == 1


def test_agent_needs_a_claim_first(server: Scripted) -> None:
    agent = JobAgentClient(server.url, "t", "1")
    with pytest.raises(errors.Conflict, match="not been claimed"):
        agent.append(StreamName.OUT, 0, b"x")


def condor_service(handler: Handler, call: int) -> None:
    """Answer claims, and be busy when the second one comes; checkpoints are deleted in between."""
    if handler.command == "DELETE":
        handler.answer(204)
    elif call in {3, 4}:
        handler.answer(503)
    else:
        handler.document(201, {"token": f"of-the-job-{call}"})


def test_a_job_that_begins_anew_is_claimed_with_the_nodes_token_again(server: Scripted) -> None:
    """With the same retries as before."""
    server.script = condor_service
    retries = Retries(deadline=10.0, ceiling=0.01)
    client = CondorJobClient(server.url, "node", "htc" + "a" * 29, "ada@grid", retries=retries)
    client.begin("1" * 32)
    client.delete_checkpoints()
    client.begin("2" * 32)
    client.delete_checkpoints()
    node, first, second = "Bearer node", "Bearer of-the-job-1", "Bearer of-the-job-5"
    posts = [("POST", node)] * 3
    asked = [(call.command, call.headers["Authorization"]) for call in server.seen]
    assert asked == [("POST", node), ("DELETE", first), *posts, ("DELETE", second)]
    client.close()
