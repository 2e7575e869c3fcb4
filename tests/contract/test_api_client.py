"""The client library and the API, over real sockets."""

from __future__ import annotations

import http.client
import io
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.api_site import ATTEMPT, OTHER_ATTEMPT, Site, report_of
from tests.kit.cli import vmjobs
from tests.kit.repository_jobs import refused
from vmjobs.agent.job_source import JobSource
from vmjobs.client import Client, JobAgentClient, NodeClient, Retries, user
from vmjobs.errors import (
    Conflict,
    DigestMismatch,
    InvalidRequest,
    JobFinal,
    NotFound,
    PayloadTooLarge,
)
from vmjobs.model import (
    AttemptClaim,
    Job,
    JobAction,
    JobSpec,
    JobState,
    Node,
    Output,
    Report,
    StreamName,
)

pytestmark = [pytest.mark.in_process, pytest.mark.settings(max_disk=64)]

QUICK = Retries(deadline=120.0, first=0.05)
SPEC = JobSpec(image="tiny", script="#!/bin/sh\necho hello\n", outputs=("*",), disk=64)


@pytest.fixture
def client(site: Site, url: str) -> Iterator[Client]:
    with Client(url, site.issuer.user_token("ada"), retries=QUICK) as opened:
        yield opened


def agent_for(site: Site, url: str, job_id: str, attempt: str = ATTEMPT) -> JobAgentClient:
    agent = JobAgentClient(url, site.issuer.job_token(job_id, "ada"), job_id, retries=QUICK)
    agent.claim(AttemptClaim(attempt=attempt, node="wn1"))
    return agent


def tell(agent: JobSource, *states: JobState, **more: object) -> None:
    for state in states:
        agent.report(Report.model_validate(report_of(state, **more)))


GOOD = {"exit": {"code": 0, "channel": "endpoint"}}
UP = (JobState.STAGING, JobState.BOOTING, JobState.RUNNING)


def test_a_job_from_submission_to_its_output(
    site: Site, url: str, client: Client, tmp_path: Path
) -> None:
    source = tmp_path / "events.dat"
    source.write_bytes(os.urandom(700_000))
    steps: list[tuple[int, int]] = []
    file = client.upload_input(source, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (700_000, 700_000)
    assert client.has_blob(file.digest)
    spec = SPEC.model_copy(update={"inputs": (file,)})
    submitted = client.submit(spec)
    (job,) = submitted.jobs

    agent = agent_for(site, url, job.id)
    sink = io.BytesIO()
    agent.fetch_input(file, sink)
    assert sink.getvalue() == source.read_bytes()
    tell(agent, *UP)
    agent.append(StreamName.OUT, 0, b"hello\n")
    tell(agent, JobState.COLLECTING)
    output = agent.put_output("plots/mass.png", io.BytesIO(b"PNG" * 100_000), 300_000)
    refused(InvalidRequest, lambda: agent.put_output("../a", io.BytesIO(b"x"), 1))
    tell(agent, JobState.COMPLETED, **GOOD)

    (done,) = client.wait([job.id], timeout=60)
    assert (done.state, done.exit and done.exit.ok) == (JobState.COMPLETED, True)
    assert b"".join(client.stream(job.id, StreamName.OUT)) == b"hello\n"
    assert list(client.outputs(job.id).outputs) == [output]
    path = client.download_output(job.id, output, tmp_path / "results")
    assert path == tmp_path / "results" / "plots" / "mass.png"
    assert path.read_bytes() == b"PNG" * 100_000
    assert [p.name for p in path.parent.iterdir()] == ["mass.png"]
    states = [event.state for event in client.events(job.id)]
    assert states[0] == JobState.QUEUED
    assert states[-1] == JobState.COMPLETED


def test_uploading_again_sends_nothing(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"abc")
    first = client.upload_input(source, "data/a")
    steps: list[tuple[int, int]] = []
    second = client.upload_input(
        source, "data/b", progress=lambda done, total: steps.append((done, total))
    )
    assert (first.digest, first.name, second.name) == (second.digest, "data/a", "data/b")
    assert steps == [(3, 3)]


def test_files_that_cannot_be_uploaded(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert client.has_blob(client.upload_input(tmp_path / "a").digest)  # an empty file can
    for path in (tmp_path, tmp_path / "none"):
        refused(InvalidRequest, lambda p=path: client.upload_input(p), match="is not a regular file")
    refused(InvalidRequest, lambda: client.upload_input(tmp_path / "a", "../a"), match="name")
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(65 << 20)
    refused(PayloadTooLarge, lambda: client.upload_input(big))


def test_lists_page_by_page(client: Client) -> None:
    jobs = {job.id for job in client.submit(SPEC, 5).jobs}
    page = client.job_page(limit=2)
    assert len(page.jobs) == 2
    rest = client.job_page(limit=2000, cursor=page.next)
    assert {job.id for job in page.jobs + rest.jobs} == jobs
    assert {job.id for job in client.jobs()} == jobs
    assert list(client.jobs([JobState.RUNNING])) == []


def test_sets_of_jobs_are_canceled(client: Client) -> None:
    array = client.submit(SPEC, 2)
    canceled = client.change_jobs(JobAction.CANCEL, [array.array], [JobState.QUEUED])
    assert [(each.index, each.state) for each in canceled] == [
        (0, JobState.CANCELED),
        (1, JobState.CANCELED),
    ]
    refused(NotFound, lambda: client.job("../jobs"))


def test_wait_tells_of_changes_and_honours_its_timeout(
    site: Site, url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = client.submit(SPEC, 2).jobs
    seen: list[tuple[str, JobState]] = []

    def on_change(job: Job) -> None:
        seen.append((job.id, job.state))
        if len(seen) == 2:
            tell(agent_for(site, url, first.id), JobState.STAGING)
            client.cancel(second.id)

    # Its clock counts the changes: the timeout is over once all have been seen, on a slow host, too.
    monkeypatch.setattr(user, "time", SimpleNamespace(monotonic=lambda: len(seen)))
    found = client.wait([second.id, first.id], timeout=4, on_change=on_change)
    assert [(job.id, job.state) for job in found] == [
        (second.id, JobState.CANCELED),
        (first.id, JobState.STAGING),
    ]
    assert seen[-1] in {(first.id, JobState.STAGING), (second.id, JobState.CANCELED)}
    assert len(seen) == 4


def test_follow_a_growing_stream(site: Site, url: str, client: Client) -> None:
    (job,) = client.submit(SPEC).jobs
    agent = agent_for(site, url, job.id)
    tell(agent, *UP)
    agent.append(StreamName.OUT, 0, b"one\n")

    def go_on() -> None:
        agent.append(StreamName.OUT, 4, b"two\n")
        tell(agent, JobState.COLLECTING)
        tell(agent, JobState.COMPLETED, **GOOD)

    pieces = client.follow(job.id, StreamName.OUT, timeout=120)
    assert next(pieces) == b"one\n"
    threading.Thread(target=go_on).start()
    assert b"".join(pieces) == b"two\n"
    assert b"".join(client.stream(job.id, StreamName.OUT, 4)) == b"two\n"
    assert b"".join(client.stream(job.id, StreamName.OUT, 8)) == b""


def test_follow_begins_anew_with_a_new_attempt(site: Site, url: str, client: Client) -> None:
    (job,) = client.submit(SPEC).jobs
    first = agent_for(site, url, job.id)
    tell(first, *UP)
    first.append(StreamName.OUT, 0, b"first attempt\n")
    pieces = client.follow(job.id, StreamName.OUT, timeout=120)
    assert next(pieces) == b"first attempt\n"
    second = agent_for(site, url, job.id, OTHER_ATTEMPT)
    tell(second, *UP, JobState.COLLECTING)
    second.append(StreamName.OUT, 0, b"second\n")
    tell(second, JobState.COMPLETED, **GOOD)
    assert b"".join(pieces) == b"second\n"


@pytest.mark.parametrize("path", ["../evil", "/evil", "a/../../evil", "a\nb"])
def test_hostile_output_names_write_nothing(client: Client, tmp_path: Path, path: str) -> None:
    evil = Output.model_construct(path=path, size=1, digest="sha256:" + "0" * 64)
    refused(InvalidRequest, lambda: client.download_output("0" * 32, evil, tmp_path / "results"))
    assert not list(tmp_path.glob("**/evil"))


def test_other_bytes_are_not_kept(site: Site, url: str, client: Client, tmp_path: Path) -> None:
    (job,) = client.submit(SPEC).jobs
    agent = agent_for(site, url, job.id)
    tell(agent, *UP, JobState.COLLECTING)
    output = agent.put_output("a", io.BytesIO(b"good"), 4)
    wrong = output.model_copy(update={"digest": "sha256:" + "0" * 64})
    refused(DigestMismatch, lambda: client.download_output(job.id, wrong, tmp_path / "results"))
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.starts_processes
def test_outputs_that_cannot_be_written_keep_no_other_back(
    site: Site, url: str, client: Client, tmp_path: Path
) -> None:
    """An older job may have both a file and files in a directory of the same name."""
    (job,) = client.submit(SPEC.model_copy(update={"outputs": ("*", "*/*")})).jobs
    agent = agent_for(site, url, job.id)
    tell(agent, *UP, JobState.COLLECTING)
    for name in ("dir", "dir/file", "other"):
        agent.put_output(name, io.BytesIO(name.encode()), len(name))
    tell(agent, JobState.COMPLETED, **GOOD)
    (tmp_path / "token").write_text(site.issuer.user_token("ada"))
    words = ("job", "outputs", job.id, "--fetch", tmp_path / "results")
    done = vmjobs(*words, api_url=url, token_file=tmp_path / "token")
    fetched = [tmp_path / "results" / name for name in ("dir", "other")]
    assert done.out.splitlines() == list(map(str, fetched))
    assert [path.read_text() for path in fetched] == ["dir", "other"]
    assert done.code != 0
    assert f"1 of 3 outputs not fetched: {job.id} dir/file: cannot write" in done.err
    assert "Traceback" not in done.err


def test_the_rest_of_the_service(site: Site, url: str, client: Client) -> None:
    (image,) = client.images()
    assert (image.name, image.digest) == ("tiny", site.image)
    assert client.image("tiny:latest").digest == site.image
    assert client.nodes() == []
    node = Node(name="wn1.grid", cpus=4, memory=8000, disk=1000, updated=datetime.now(UTC))
    NodeClient(url, site.issuer.node_token("wn1.grid"), retries=QUICK).put_node(node)
    assert client.node("wn1.grid").cpus == 4
    assert client.service_info().limits.disk == 64
    assert client.health().status == "ok"
    refused(NotFound, lambda: client.image("none"))


def test_agent_learns_how_a_job_ended_that_is_run_again(site: Site, url: str, client: Client) -> None:
    (job,) = client.submit(SPEC).jobs
    agent = agent_for(site, url, job.id)
    tell(agent, *UP, JobState.COLLECTING)
    refused(Conflict, agent.end, match="has not ended")
    tell(agent, JobState.FAILED, exit={"code": 3, "channel": "endpoint"})
    end = agent.end()
    assert (end.state, end.exit.code) == (JobState.FAILED, 3)
    refused(JobFinal, lambda: agent_for(site, url, job.id, OTHER_ATTEMPT))


def test_long_streams_are_sent_in_pieces(site: Site, url: str, client: Client) -> None:
    (job,) = client.submit(SPEC).jobs
    agent = agent_for(site, url, job.id)
    data = os.urandom(9_000_000)
    agent.append(StreamName.CONSOLE, 0, data)
    assert b"".join(client.stream(job.id, StreamName.CONSOLE)) == data
    assert b"".join(client.stream(job.id, StreamName.CONSOLE, 8_999_990)) == data[-10:]


def test_chunked_output_is_refused(site: Site, url: str, client: Client) -> None:
    (job,) = client.submit(SPEC).jobs
    agent_for(site, url, job.id)
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request(
        "PUT",
        f"/v1/jobs/{job.id}/attempts/{ATTEMPT}/outputs/a",
        body=iter([b"x", b"y"]),
        headers={"Authorization": f"Bearer {site.issuer.job_token(job.id, 'ada')}"},
        encode_chunked=True,
    )
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (411, "LENGTH_REQUIRED")
    connection.close()
