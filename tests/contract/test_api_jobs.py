"""Jobs over REST: good and bad submissions, reading, paging, canceling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_support import ATTEMPT, Site, good_spec, make_site, report_of

from api.tokens import Scope
from vmjobs.model import MAX_SCRIPT_BYTES, JobState

pytestmark = pytest.mark.in_process

DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path, max_cpus=8, max_memory=4096, max_disk=2048, max_run_seconds=7200)


# ----------------------------------------------------------------- submission


def test_submit_answers_with_the_jobs_and_publishes_the_array(site: Site) -> None:
    answer = site.user()("POST", "/v1/jobs", json={"spec": good_spec(), "count": 3})
    assert answer.status_code == 201
    body = answer.get_json()
    assert [job["index"] for job in body["jobs"]] == [0, 1, 2]
    assert {job["state"] for job in body["jobs"]} == {"QUEUED"}
    assert {job["image_digest"] for job in body["jobs"]} == {site.image}
    assert answer.headers["Location"] == f"/v1/jobs/{body['jobs'][0]['id']}"
    assert site.queue.arrays == [body["array"]]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"image": "nowhere:1"}, "spec.image"),
    ({"image": DIGEST}, "spec.image"),
    ({"image": "../etc"}, "spec.image"),
    ({"image": 5}, "spec.image"),
    ({"script": ""}, "spec.script"),
    ({"script": " \n"}, "spec.script"),
    ({"script": "echo \0"}, "spec.script"),
    ({"script": "x" * (MAX_SCRIPT_BYTES + 1)}, "spec.script"),
    ({"script": None}, "spec.script"),
    ({"cpus": 0}, "spec.cpus"),
    ({"cpus": -1}, "spec.cpus"),
    ({"cpus": 9}, "spec.cpus"),
    ({"cpus": 10**30}, "spec.cpus"),
    ({"cpus": "2"}, "spec.cpus"),
    ({"cpus": 1.5}, "spec.cpus"),
    ({"cpus": True}, "spec.cpus"),
    ({"memory": 0}, "spec.memory"),
    ({"memory": -512}, "spec.memory"),
    ({"memory": 4097}, "spec.memory"),
    ({"disk": 0}, "spec.disk"),
    ({"disk": -1}, "spec.disk"),
    ({"disk": 2049}, "spec.disk"),
    ({"run_seconds": 0}, "spec.run_seconds"),
    ({"run_seconds": -5}, "spec.run_seconds"),
    ({"run_seconds": 7201}, "spec.run_seconds"),
    ({"boot_seconds": 0}, "spec.boot_seconds"),
    ({"outputs": ["../secret"]}, "spec.outputs.0"),
    ({"outputs": ["ok", "/etc/*"]}, "spec.outputs.1"),
    ({"outputs": "a"}, "spec.outputs"),
    ({"arguments": [1]}, "spec.arguments.0"),
    ({"arguments": ["a\0"]}, "spec.arguments.0"),
    ({"environment": {"1A": "x"}}, "spec.environment"),
    ({"environment": {"A": "\0"}}, "spec.environment"),
    ({"inputs": [{"name": "a", "digest": DIGEST, "size": 1}]}, "spec.inputs.0"),
    ({"inputs": [{"name": "../a", "digest": DIGEST, "size": 1}]}, "spec.inputs.0.name"),
    ({"inputs": [{"name": "a", "digest": "md5:1", "size": 1}]}, "spec.inputs.0.digest"),
    ({"inputs": [{"name": "a", "digest": DIGEST, "size": -1}]}, "spec.inputs.0.size"),
    ({"hypervisor": "vmware"}, "spec.hypervisor"),
    ({"network": "all"}, "spec.network"),
    ({"strategy": "magic"}, "spec.strategy"),
    ({"route": "no/where"}, "spec.route"),
    ({"route": "nowhere"}, "spec.route"),
    ({"labels": {"a b": "c"}}, "spec.labels"),
    ({"colour": "red"}, "spec.colour"),
]


@pytest.mark.parametrize(("change", "field"), BAD_FIELDS, ids=lambda v: str(v)[:40])
def test_bad_field_is_named(site: Site, change: dict[str, Any], field: str) -> None:
    problem = site.user().problem(422, "POST", "/v1/jobs", json={"spec": good_spec(**change)})
    assert problem["code"] == "INVALID_SPEC"
    fields = [fault["field"] for fault in problem["errors"]]
    assert any(found == field or found.startswith(f"{field}.") for found in fields), problem
    assert all(fault["message"] and fault["code"] for fault in problem["errors"])
    assert site.queue.arrays == []


@pytest.mark.parametrize("count", [0, -1, 1001, "2", 1.5, None])
def test_bad_count(site: Site, count: Any) -> None:
    body = {"spec": good_spec(), "count": count}
    problem = site.user().problem(422, "POST", "/v1/jobs", json=body)
    assert [fault["field"] for fault in problem["errors"]] == ["count"]


def test_all_faults_come_in_one_answer(site: Site) -> None:
    bad = good_spec(cpus=0, memory="much", outputs=["../x"], script="", network="all")
    problem = site.user().problem(422, "POST", "/v1/jobs", json={"spec": bad, "count": 0})
    assert {fault["field"] for fault in problem["errors"]} == {
        "spec.cpus",
        "spec.memory",
        "spec.outputs.0",
        "spec.script",
        "spec.network",
        "count",
    }


def test_faults_of_both_kinds_come_in_one_answer(site: Site) -> None:
    bad = good_spec(
        image="nowhere",
        script="",
        cpus=9,
        memory="much",
        colour="red",
        inputs=[{"name": "a", "digest": DIGEST, "size": 1}],
    )
    problem = site.user().problem(422, "POST", "/v1/jobs", json={"spec": bad, "count": 0})
    assert sorted(fault["field"] for fault in problem["errors"]) == [
        "count",
        "spec.colour",
        "spec.cpus",
        "spec.image",
        "spec.inputs.0",
        "spec.memory",
        "spec.script",
    ]


@pytest.mark.parametrize(
    "body", [[], {}, {"spec": None}, {"spec": []}, {"spec": {}}, {"spec": {"image": []}}]
)
def test_hardly_a_submission(site: Site, body: Any) -> None:
    problem = site.user().problem(422, "POST", "/v1/jobs", json=body)
    fields = [fault["field"] for fault in problem["errors"]]
    assert fields
    assert len(fields) == len(set(fields))


def test_all_faults_that_only_the_repository_can_find(site: Site) -> None:
    bad = good_spec(
        image="nowhere", cpus=9, memory=9999, inputs=[{"name": "a", "digest": DIGEST, "size": 1}]
    )
    problem = site.user().problem(422, "POST", "/v1/jobs", json={"spec": bad})
    fields = {fault["field"] for fault in problem["errors"]}
    assert fields == {"spec.image", "spec.cpus", "spec.memory", "spec.inputs.0"}


@pytest.mark.parametrize(
    ("data", "kind", "status", "code"),
    [
        (b"{}", "text/plain", 415, "UNSUPPORTED_MEDIA_TYPE"),
        (b"a=b", "application/x-www-form-urlencoded", 415, "UNSUPPORTED_MEDIA_TYPE"),
        (b"{}", None, 415, "UNSUPPORTED_MEDIA_TYPE"),
        (b"", "application/json", 400, "MALFORMED_JSON"),
        (b"{", "application/json", 400, "MALFORMED_JSON"),
        (b"\xff\xfe", "application/json", 400, "MALFORMED_JSON"),
        (b'{"spec": {"script": "\\ud800"}}', "application/json", 400, "MALFORMED_JSON"),
        (b"[" * 100_000, "application/json", 400, "MALFORMED_JSON"),
        (b"[]", "application/json", 422, "INVALID_SPEC"),
        (b"null", "application/json; charset=utf-8", 422, "INVALID_SPEC"),
        (b'"' + b"x" * (8 << 20) + b'"', "application/json", 413, "TOO_LARGE"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_bodies_that_are_none(
    site: Site, data: bytes, kind: str | None, status: int, code: str
) -> None:
    problem = site.user().problem(status, "POST", "/v1/jobs", data=data, content_type=kind)
    assert problem["code"] == code


def test_same_key_same_body_submits_once(site: Site) -> None:
    user = site.user()
    first, again = (
        user("POST", "/v1/jobs", json={"spec": good_spec()}, headers={"Idempotency-Key": "k-1"})
        for _ in range(2)
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.get_json()["jobs"][0]["id"] == again.get_json()["jobs"][0]["id"]
    assert len(site.queue.arrays) == 1


def test_same_key_other_body_is_a_conflict(site: Site) -> None:
    headers = {"Idempotency-Key": "k-1"}
    site.user()("POST", "/v1/jobs", json={"spec": good_spec()}, headers=headers)
    problem = site.user().problem(
        409, "POST", "/v1/jobs", json={"spec": good_spec(cpus=2)}, headers=headers
    )
    assert problem["code"] == "IDEMPOTENCY_CONFLICT"
    other = site.user("bob")("POST", "/v1/jobs", json={"spec": good_spec()}, headers=headers)
    assert other.status_code == 201


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "caf\xe9"])
def test_bad_keys(site: Site, key: str) -> None:
    problem = site.user().problem(
        422, "POST", "/v1/jobs", json={"spec": good_spec()}, headers={"Idempotency-Key": key}
    )
    assert problem["errors"][0]["field"] == "Idempotency-Key"


def test_longest_key_is_taken(site: Site) -> None:
    headers = {"Idempotency-Key": "~" * 255}
    answer = site.user()("POST", "/v1/jobs", json={"spec": good_spec()}, headers=headers)
    assert answer.status_code == 201


def test_broker_down_stores_nothing(site: Site) -> None:
    site.queue.down = True
    user = site.user()
    problem = user.problem(503, "POST", "/v1/jobs", json={"spec": good_spec()})
    assert (problem["code"], problem["service"]) == ("UNAVAILABLE", "broker")
    assert user("GET", "/v1/jobs").get_json()["jobs"] == []


# ----------------------------------------------------------------- who may


def test_no_token(site: Site) -> None:
    answer = site.caller()("GET", "/v1/jobs")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="vmjobs"'


def test_bad_tokens(site: Site, tmp_path: Path) -> None:
    foreign = make_site(tmp_path / "other", issuer="https://other.example.org")
    same_name = make_site(tmp_path / "third")
    for token, sentence in (
        ("rubbish", "malformed"),
        (site.issuer.user_token("ada", lifetime=-1), "expired"),
        (foreign.issuer.user_token("ada"), "issued by someone"),
        (same_name.issuer.user_token("ada"), "signature"),
    ):
        problem = site.caller(token).problem(401, "GET", "/v1/jobs")
        assert problem["code"] == "UNAUTHENTICATED"
        assert sentence in problem["detail"]


def test_scopes_are_needed(site: Site) -> None:
    (job,) = site.user().submit()
    reader = site.caller(site.issuer.user_token("ada", [Scope.COMPUTE_READ]))
    assert reader("GET", f"/v1/jobs/{job}").status_code == 200
    answer = reader("DELETE", f"/v1/jobs/{job}")
    assert answer.status_code == 403
    assert 'scope="compute.cancel"' in answer.headers["WWW-Authenticate"]
    assert reader("POST", "/v1/jobs", json={}).status_code == 403
    assert reader("GET", f"/v1/jobs/{job}/outputs/a").status_code == 403
    assert reader("PUT", f"/v1/blobs/{DIGEST}", data=b"").status_code == 403


def test_another_users_job_does_not_exist(site: Site) -> None:
    (job,) = site.user("ada").submit()
    bob = site.user("bob")
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/events"),
        ("GET", "/out"),
        ("GET", "/outputs"),
        ("GET", "/outputs/a"),
    ):
        problem = bob.problem(404, method, f"/v1/jobs/{job}{path}")
        assert problem["code"] == "NOT_FOUND"
    assert bob("GET", "/v1/jobs").get_json()["jobs"] == []
    assert bob("GET", f"/v1/jobs?array={job}").get_json()["jobs"] == []


def test_job_tokens_are_not_for_users_business(site: Site) -> None:
    (job,) = site.user().submit()
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/out"), ("GET", "/outputs/a")):
        site.agent(job).problem(403, method, f"/v1/jobs/{job}{path}")
    site.agent(job).problem(403, "GET", "/v1/jobs")
    site.agent(job).problem(403, "POST", "/v1/jobs", json={})


# ----------------------------------------------------------------- reading


def test_etag_and_304(site: Site) -> None:
    user = site.user()
    (job,) = user.submit()
    first = user("GET", f"/v1/jobs/{job}")
    same = user("GET", f"/v1/jobs/{job}", headers={"If-None-Match": first.headers["ETag"]})
    assert (same.status_code, same.data) == (304, b"")
    assert same.headers["ETag"] == first.headers["ETag"]
    site.agent(job)("POST", f"/v1/jobs/{job}/attempts", json={"attempt": ATTEMPT, "node": "n"})
    site.agent(job)(
        "POST", f"/v1/jobs/{job}/attempts/{ATTEMPT}/reports", json=report_of(JobState.STAGING)
    )
    changed = user("GET", f"/v1/jobs/{job}", headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status_code == 200
    assert changed.get_json()["state"] == "STAGING"


def test_pages_follow_each_other(site: Site) -> None:
    user = site.user()
    ids = user.submit(3) + user.submit(2)
    seen: list[str] = []
    cursor, pages = "", 0
    while True:
        body = user("GET", f"/v1/jobs?limit=2&cursor={cursor}").get_json()
        seen += [job["id"] for job in body["jobs"]]
        pages += 1
        cursor = body["next"]
        if not cursor:
            break
    assert (pages, len(seen), set(seen)) == (3, 5, set(ids))


def test_filters(site: Site) -> None:
    user = site.user()
    first, second = user.submit(2)
    (third,) = user.submit()
    array = user("GET", f"/v1/jobs/{first}").get_json()["array"]
    found = user("GET", f"/v1/jobs?array={array}").get_json()["jobs"]
    assert {job["id"] for job in found} == {first, second}
    user("DELETE", f"/v1/jobs/{third}")
    found = user("GET", "/v1/jobs?state=QUEUED,RUNNING").get_json()["jobs"]
    assert {job["id"] for job in found} == {first, second}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=DONE", "state.0"),
        ("limit=0", "limit"),
        ("limit=2001", "limit"),
        ("limit=many", "limit"),
        ("limit=1&limit=2", "limit"),
        ("cursor=bogus", "cursor"),
        ("color=red", "color"),
    ],
)
def test_bad_queries(site: Site, query: str, field: str) -> None:
    problem = site.user().problem(422, "GET", f"/v1/jobs?{query}")
    assert [fault["field"] for fault in problem["errors"]] == [field]


def test_history(site: Site) -> None:
    user = site.user()
    (job,) = user.submit()
    user("DELETE", f"/v1/jobs/{job}")
    events = user("GET", f"/v1/jobs/{job}/events").get_json()["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["reason"]["code"] == "SUBMITTED"
    later = user("GET", f"/v1/jobs/{job}/events?after=1").get_json()["events"]
    assert later == events[1:]
    user.problem(422, "GET", f"/v1/jobs/{job}/events?after=-1")


def test_the_beginning_of_an_id_stands_for_it(site: Site) -> None:
    ada, bob = site.user(), site.user("bob")
    (job,) = ada.submit()
    bob.submit()  # begins with the same 6 digits, which does not matter to ada
    for length in (6, 12, 31):
        assert ada("GET", f"/v1/jobs/{job[:length]}").get_json()["id"] == job
        assert ada("GET", f"/v1/jobs/{job[:length]}/events").status_code == 200
    ada.problem(404, "GET", f"/v1/jobs/{job[:5]}")
    bob.problem(404, "GET", f"/v1/jobs/{job[:31]}")
    array = ada("GET", f"/v1/jobs/{job}").get_json()["array"]
    found = ada("GET", f"/v1/jobs?array={array[:20]}").get_json()["jobs"]
    assert [each["id"] for each in found] == [job]
    assert ada("DELETE", f"/v1/jobs/{job[:20]}").get_json()["id"] == job


def test_the_beginning_of_several_ids_names_them(site: Site) -> None:
    ada = site.user()
    first, second = ada.submit(2)
    (others,) = site.user("bob").submit()
    problem = ada.problem(409, "DELETE", f"/v1/jobs/{first[:6]}")
    assert problem["code"] == "AMBIGUOUS_ID"
    assert first in problem["detail"] and second in problem["detail"]
    assert others not in problem["detail"]
    assert not site.queue.canceled
    jobs = ada.submit(20)
    detail = ada.problem(409, "GET", f"/v1/jobs/{jobs[0][:6]}")["detail"]
    assert sum(job in detail for job in jobs) == 8 and detail.endswith(" and more")


@pytest.mark.parametrize("job", ["0" * 32, "none", "x" * 65, "..", "%2e%2e", "a%00b", "a%2fb"])
def test_no_such_job(site: Site, job: str) -> None:
    assert site.user()("GET", f"/v1/jobs/{job}").status_code in {404, 422}


# ----------------------------------------------------------------- canceling


def test_cancel(site: Site) -> None:
    user = site.user()
    (job,) = user.submit()
    agent = site.agent(job)
    agent("POST", f"/v1/jobs/{job}/attempts", json={"attempt": ATTEMPT, "node": "n"})
    agent("POST", f"/v1/jobs/{job}/attempts/{ATTEMPT}/reports", json=report_of(JobState.STAGING))
    for _ in range(2):
        answer = user("DELETE", f"/v1/jobs/{job}")
        assert (answer.status_code, answer.get_json()["state"]) == (202, "CANCELING")
    assert job in site.queue.canceled
    agent.problem(409, "POST", f"/v1/jobs/{job}/attempts", json={"attempt": "c" * 32, "node": "n"})


def test_cancel_what_has_ended(site: Site) -> None:
    user = site.user()
    (job,) = user.submit()
    assert user("DELETE", f"/v1/jobs/{job}").get_json()["state"] == "CANCELED"
    user.problem(409, "DELETE", f"/v1/jobs/{job}")
    user.problem(404, "DELETE", "/v1/jobs/" + "0" * 32)
