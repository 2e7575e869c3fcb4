"""Jobs over REST: good and bad submissions, reading, paging, canceling."""

from __future__ import annotations

from typing import Any

import pytest

from api.tokens import Scope
from tests.kit.api_site import Site, good_spec

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(max_cpus=8, max_memory=4096, max_disk=2048, max_run_seconds=7200),
]

DIGEST = "sha256:" + "0" * 64


def test_submit_answers_with_the_jobs_and_publishes_the_array(site: Site) -> None:
    answer = site.user()("POST", "/v1/jobs", json={"spec": good_spec(), "count": 3})
    assert answer.status_code == 201
    body = answer.get_json()
    assert [job["index"] for job in body["jobs"]] == [0, 1, 2]
    assert {job["state"] for job in body["jobs"]} == {"QUEUED"}
    assert {job["image_digest"] for job in body["jobs"]} == {site.image}
    assert answer.headers["Location"] == f"/v1/jobs/{body['jobs'][0]['id']}"
    assert site.queue.arrays == [body["array"]]
    site.queue.down = True
    problem = site.user().problem(503, "POST", "/v1/jobs", json={"spec": good_spec()})
    assert problem["service"] == "broker"


def test_bad_counts(site: Site) -> None:
    for count in (0, -1, 1001, "2", 1.5, None):
        body = {"spec": good_spec(), "count": count}
        problem = site.user().problem(422, "POST", "/v1/jobs", json=body)
        assert [fault["field"] for fault in problem["errors"]] == ["count"]


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


def test_hardly_a_submission(site: Site) -> None:
    bodies: tuple[Any, ...] = (
        [],
        {},
        {"spec": None},
        {"spec": []},
        {"spec": {}},
        {"spec": {"image": []}},
    )
    for body in bodies:
        problem = site.user().problem(422, "POST", "/v1/jobs", json=body)
        fields = [fault["field"] for fault in problem["errors"]]
        assert fields
        assert len(fields) == len(set(fields))


def test_bodies_that_are_none(site: Site) -> None:
    rows: list[tuple[bytes, str | None, int, str]] = [
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
    ]
    for data, kind, status, code in rows:
        problem = site.user().problem(status, "POST", "/v1/jobs", data=data, content_type=kind)
        assert problem["code"] == code, data[:40]


def test_a_key_submits_once(site: Site) -> None:
    user, headers = site.user(), {"Idempotency-Key": "~" * 255}
    first, again = (
        user("POST", "/v1/jobs", json={"spec": good_spec()}, headers=headers) for _ in range(2)
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.get_json()["jobs"][0]["id"] == again.get_json()["jobs"][0]["id"]
    assert len(site.queue.arrays) == 1
    other = {"spec": good_spec(cpus=2)}
    problem = user.problem(409, "POST", "/v1/jobs", json=other, headers=headers)
    assert problem["code"] == "IDEMPOTENCY_CONFLICT"
    assert site.user("bob")("POST", "/v1/jobs", json=other, headers=headers).status_code == 201


def test_bad_keys(site: Site) -> None:
    for key in ("", " ", "a b", "x" * 256, "caf\xe9"):
        headers = {"Idempotency-Key": key}
        problem = site.user().problem(
            422, "POST", "/v1/jobs", json={"spec": good_spec()}, headers=headers
        )
        assert problem["errors"][0]["field"] == "Idempotency-Key"


def test_no_token(site: Site) -> None:
    answer = site.caller()("GET", "/v1/jobs")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="vmjobs"'


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


def test_etag_and_304(site: Site) -> None:
    user = site.user()
    (job,) = user.submit()
    first = user("GET", f"/v1/jobs/{job}")
    same = user("GET", f"/v1/jobs/{job}", headers={"If-None-Match": first.headers["ETag"]})
    assert (same.status_code, same.data) == (304, b"")
    assert same.headers["ETag"] == first.headers["ETag"]
    site.stage(job)
    changed = user("GET", f"/v1/jobs/{job}", headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status_code == 200
    assert changed.get_json()["state"] == "STAGING"


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


def test_bad_queries(site: Site) -> None:
    for query, field in {
        "state=DONE": "state.0",
        "limit=0": "limit",
        "limit=2001": "limit",
        "limit=many": "limit",
        "limit=1&limit=2": "limit",
        "cursor=bogus": "cursor",
        "color=red": "color",
    }.items():
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


def test_no_such_job(site: Site) -> None:
    for job in ("0" * 32, "none", "x" * 65, "..", "%2e%2e", "a%00b", "a%2fb"):
        assert site.user()("GET", f"/v1/jobs/{job}").status_code in {404, 422}


def test_cancel(site: Site) -> None:
    user = site.user()
    (job,) = user.submit()
    site.stage(job)
    for _ in range(2):
        answer = user("DELETE", f"/v1/jobs/{job}")
        assert (answer.status_code, answer.get_json()["state"]) == (202, "CANCELING")
    assert job in site.queue.canceled
    assert user.problem(422, "POST", "/v1/jobs:cancel", json={})["errors"][0]["message"].startswith(
        "say which jobs"
    )
    user.problem(404, "POST", "/v1/jobs:cancel", json={"jobs": [job, "0" * 32]})
    more = user.submit(3)
    answer = user("POST", "/v1/jobs:cancel", json={"jobs": [job, *more]})
    assert answer.status_code == 202
    states = {found["id"]: found["state"] for found in answer.get_json()["jobs"]}
    assert states == {job: "CANCELING", **dict.fromkeys(more, "CANCELED")}
