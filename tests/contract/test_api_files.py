"""Bytes over REST: blobs, streams, outputs and images; ranges, and malicious paths."""

from __future__ import annotations

import pytest

from tests.kit.api_site import ATTEMPT, Caller, Site, report_of
from tests.kit.repository_jobs import digest_of
from vmjobs.model import MIB, JobState

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(max_disk=1, max_input_size=1, max_stream_bytes=1000),
]

HOSTILE = [
    *("../secret", "a/../../secret", "%2e%2e/secret", "%2e%2e%2fsecret", "a/%2e%2e/%2e%2e/secret"),
    *("/etc/passwd", "%2fetc%2fpasswd", "a%00b", "a%0ab", "..%5csecret", "a%5cb", ".", "..", "x" * 256),
]


@pytest.fixture
def job(site: Site) -> str:
    """A job that has an input, is claimed and is in STAGING."""
    data = b"events"
    site.user()("PUT", f"/v1/blobs/{digest_of(data)}", data=data)
    inputs = [{"name": "data/in.root", "digest": digest_of(data), "size": len(data)}]
    (job_id,) = site.user().submit(inputs=inputs, outputs=["*"], disk=1)
    site.stage(job_id)
    return job_id


def attempt_of(job: str) -> str:
    return f"/v1/jobs/{job}/attempts/{ATTEMPT}"


def test_bad_digest(site: Site) -> None:
    for name in ("abc", "sha256:abc", "md5:" + "0" * 64, "sha256:" + "G" * 64):
        problem = site.user().problem(422, "PUT", f"/v1/blobs/{name}", data=b"")
        assert problem["errors"][0]["field"] == "digest"


def append(agent: Caller, job: str, offset: int, data: bytes, name: str = "out") -> int:
    path = f"{attempt_of(job)}/streams/{name}?offset={offset}"
    return agent("POST", path, data=data).status_code


def test_streams_grow_and_are_read_in_ranges(site: Site, job: str) -> None:
    agent, user, path = site.agent(job), site.user(), f"/v1/jobs/{job}/out"
    assert user("GET", path).data == b""
    assert append(agent, job, 0, b"hello ") == 204
    assert append(agent, job, 6, b"world") == 204
    answer = user("GET", path)
    assert (answer.data, answer.headers["Accept-Ranges"]) == (b"hello world", "bytes")
    part = user("GET", path, headers={"Range": "bytes=6-"})
    assert (part.status_code, part.data) == (206, b"world")
    head = user("HEAD", path)
    assert (head.status_code, head.headers["Content-Length"], head.data) == (200, "11", b"")


def test_bad_streams(site: Site, job: str) -> None:
    agent = site.agent(job)
    for query in ("", "?offset=-1", "?offset=x", "?offset=1&more=2"):
        agent.problem(422, "POST", f"{attempt_of(job)}/streams/out{query}", data=b"x")
    agent.problem(404, "POST", f"{attempt_of(job)}/streams/log?offset=0", data=b"x")
    big = b"x" * (8 * MIB + 1)
    agent.problem(413, "POST", f"{attempt_of(job)}/streams/out?offset=0", data=big)
    site.user().problem(404, "GET", f"/v1/jobs/{job}/log")


def test_what_a_guest_wrote_is_no_page_of_ours(site: Site, job: str) -> None:
    append(site.agent(job), job, 0, b"<script>alert(1)</script>")
    headers = site.user()("GET", f"/v1/jobs/{job}/out").headers
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in headers["Content-Security-Policy"]


def test_outputs_are_delivered_listed_and_read(site: Site, job: str) -> None:
    agent, user = site.agent(job), site.user()
    answer = agent("PUT", f"{attempt_of(job)}/outputs/plots/a%20b.png", data=b"0123456789")
    assert answer.status_code == 201
    stored = answer.get_json()
    assert stored == {"path": "plots/a b.png", "size": 10, "digest": digest_of(b"0123456789")}
    listed = user("GET", f"/v1/jobs/{job}/outputs").get_json()
    assert listed == {"outputs": [stored], "rejected": []}
    path = f"/v1/jobs/{job}/outputs/plots/a%20b.png"
    whole = user("GET", path)
    assert (whole.data, whole.headers["ETag"]) == (b"0123456789", f'"{stored["digest"]}"')
    part = user("GET", path, headers={"Range": "bytes=3-5"})
    assert (part.status_code, part.data) == (206, b"345")
    same = user("GET", path, headers={"If-None-Match": whole.headers["ETag"]})
    assert (same.status_code, same.data) == (304, b"")
    user.problem(404, "GET", f"/v1/jobs/{job}/outputs/none")


def damage(site: Site, job: str, data: bytes) -> str:
    """Deliver ``data`` as output ``a``, change it where it is stored, and return its digest."""
    site.agent(job)("PUT", f"{attempt_of(job)}/outputs/a", data=data)
    name = digest_of(data).removeprefix("sha256:")
    (blob,) = (site.config.data_dir / "objects" / "blobs").rglob(name)
    blob.chmod(0o600)
    blob.write_bytes(b"evil" + data[4:])
    return name


def test_a_small_output_that_is_corrupt_is_named_and_refused(site: Site, job: str) -> None:
    name = damage(site, job, b"good bytes")
    problem = site.user().problem(502, "GET", f"/v1/jobs/{job}/outputs/a")
    assert problem["code"] == "DIGEST_MISMATCH"
    assert name in problem["detail"]


def test_a_large_output_that_is_corrupt_is_never_handed_out_whole(site: Site, job: str) -> None:
    damage(site, job, b"good" * 100_000)
    with pytest.raises(Exception, match=r"corrupt|sha256"):
        _ = site.user()("GET", f"/v1/jobs/{job}/outputs/a").data


def test_hostile_paths_are_refused_everywhere(site: Site, job: str) -> None:
    agent, user = site.agent(job), site.user()
    for path in HOSTILE:
        assert agent("PUT", f"{attempt_of(job)}/outputs/{path}", data=b"x").status_code in {404, 422}
        assert user("GET", f"/v1/jobs/{job}/outputs/{path}").status_code in {404, 422}, path
        assert agent("GET", f"/v1/jobs/{job}/inputs/{path}").status_code in {404, 422}, path
    assert user("GET", f"/v1/jobs/{job}/outputs").get_json()["outputs"] == []
    assert not list(site.config.data_dir.rglob("secret"))
    problem = site.agent(job).problem(422, "PUT", f"{attempt_of(job)}/outputs/a/../../b", data=b"x")
    fault = problem["errors"][0]
    assert (fault["field"], fault["code"]) == ("relative path", "bad_path")


def test_ticket_and_inputs(site: Site, job: str) -> None:
    agent = site.agent(job)
    answer = agent("POST", f"/v1/jobs/{job}/attempts", json={"attempt": ATTEMPT, "node": "wn1"})
    ticket = answer.get_json()
    assert answer.headers["Location"] == attempt_of(job)
    assert (ticket["job_id"], ticket["attempt"], ticket["index"]) == (job, ATTEMPT, 0)
    assert ticket["image_digest"] == site.image
    data = agent("GET", f"/v1/jobs/{job}/inputs/data/in.root")
    assert (data.data, data.headers["ETag"]) == (b"events", f'"{digest_of(b"events")}"')
    agent.problem(404, "GET", f"/v1/jobs/{job}/inputs/other")


def test_nothing_is_read_by_the_agent_of_a_job_that_has_ended(site: Site, job: str) -> None:
    agent = site.agent(job)
    exit_status = {"code": 0, "channel": "endpoint"}
    for state in (JobState.BOOTING, JobState.RUNNING, JobState.COLLECTING, JobState.COMPLETED):
        report = report_of(state) | ({"exit": exit_status} if state.final else {})
        for _ in range(2):  # repeating a report is no error
            answer = agent("POST", f"{attempt_of(job)}/reports", json=report)
            assert answer.status_code == 204, answer.text
    view = site.user()("GET", f"/v1/jobs/{job}").get_json()
    assert (view["state"], view["exit"]["code"]) == ("COMPLETED", 0)
    for path in (f"/v1/jobs/{job}/inputs/data/in.root", f"/v1/images/{site.image}/manifest"):
        assert agent.problem(409, "GET", path)["code"] == "JOB_FINAL"


def test_bad_reports(site: Site, job: str) -> None:
    changes: list[tuple[dict[str, object], str]] = [
        ({"state": "DONE"}, "state"),
        ({"state": "QUEUED"}, "state"),
        ({"reason": {"code": "BAD_LUCK"}}, "reason.code"),
        ({"time": "yesterday"}, "time"),
        ({"exit": {"code": 1, "signal": 9, "channel": "endpoint"}}, "exit"),
        ({"exit": {"code": 256, "channel": "endpoint"}}, "exit.code"),
        ({"exit": {"code": 0, "channel": "pigeon"}}, "exit.channel"),
        ({"mood": "good"}, "mood"),
    ]
    for change, field in changes:
        report = report_of(JobState.RUNNING) | change
        problem = site.agent(job).problem(422, "POST", f"{attempt_of(job)}/reports", json=report)
        assert field in [fault["field"] for fault in problem["errors"]], change


def test_bad_attempt_ids(site: Site, job: str) -> None:
    for attempt in ("", "A" * 32, "a" * 31, "../../x", "g" * 32):
        claim = {"attempt": attempt, "node": "wn1"}
        problem = site.agent(job).problem(422, "POST", f"/v1/jobs/{job}/attempts", json=claim)
        assert [fault["field"] for fault in problem["errors"]] == ["attempt"]


def test_only_the_jobs_own_token_is_good(site: Site, job: str) -> None:
    (other,) = site.user().submit(disk=1)
    claim = {"attempt": "c" * 32, "node": "wn1"}
    for stranger in (site.agent(other), site.user(), site.caller(site.issuer.node_token("wn1"))):
        stranger.problem(403, "POST", f"/v1/jobs/{job}/attempts", json=claim)
        stranger.problem(403, "GET", f"/v1/jobs/{job}/inputs/data/in.root")
        stranger.problem(403, "PUT", f"{attempt_of(job)}/outputs/a", data=b"x")
