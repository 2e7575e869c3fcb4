"""Checkpoints of jobs over the REST interface: what a job's token permits."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from werkzeug.test import TestResponse

from images.content import ContentLayout
from images.segment import decode_segment
from tests.kit.api_images import DISK, checkpoint_document, open_upload, publication, put_content
from tests.kit.api_site import Caller, Site, report_of
from vmjobs.model import JobState

pytestmark = pytest.mark.in_process

S = JobState


def claimed(site: Site, who: Caller, job: str) -> str:
    """Bring a job on a node to RUNNING; return its attempt."""
    attempt = secrets.token_hex(16)
    answer = who("POST", f"/v1/jobs/{job}/attempts", json={"attempt": attempt, "node": "node1"})
    assert answer.status_code == 201, answer.text
    for state in (S.STAGING, S.BOOTING, S.RUNNING):
        path = f"/v1/jobs/{job}/attempts/{attempt}/reports"
        assert who("POST", path, json=report_of(state)).status_code == 204
    return attempt


def keep(site: Site, **change: Any) -> tuple[str, Caller, ContentLayout, TestResponse]:
    """Save a job's VM; return the job, a caller with its token, the VM's layout, the answer."""
    (job,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    who = site.agent(job)
    attempt = claimed(site, who, job)
    upload = open_upload(who)
    layout = put_content(who, upload, DISK)
    path = f"/v1/jobs/{job}/attempts/{attempt}/checkpoint?upload={upload}"
    return job, who, layout, who("PUT", path, json=checkpoint_document(attempt, layout) | change)


def test_a_jobs_token_keeps_its_vm_and_fetches_it(site: Site) -> None:
    job, who, layout, answer = keep(site)
    assert answer.status_code == 204, answer.text
    body = {"attempt": "c" * 32, "node": "node2"}
    ticket = who("POST", f"/v1/jobs/{job}/attempts", json=body).get_json()
    assert ticket["checkpoint"]["files"][0]["digest"] == layout.digest
    there = f"/v1/jobs/{job}/checkpoint"
    assert who("GET", f"{there}/contents/{layout.digest}/layout").data == layout.to_bytes()
    for number, digest in layout.stored():
        answer = who("GET", f"{there}/segments/{digest.hex()}")
        assert answer.status_code == 200
        begin = number * layout.length(0)
        assert decode_segment(answer.data, digest) == DISK[begin : begin + layout.length(number)]


def test_nobody_else_reads_it(site: Site) -> None:
    job, _, layout, _ = keep(site)
    (other,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    digest = next(digest for _, digest in layout.stored())
    for path in (f"contents/{layout.digest}/layout", f"segments/{digest.hex()}"):
        mine, theirs = f"/v1/jobs/{job}/checkpoint/{path}", f"/v1/jobs/{other}/checkpoint/{path}"
        for who in (site.user(), site.admin(), site.node("node1"), site.agent(other)):
            who.problem(403, "GET", mine)
        site.agent(other).problem(404, "GET", theirs)
        site.caller().problem(401, "GET", mine)


def test_a_jobs_token_makes_no_image_of_it(site: Site) -> None:
    (job,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    who = site.agent(job)
    upload = open_upload(who)
    layout = put_content(who, upload, DISK)
    who.problem(403, "POST", "/v1/images", json=publication(layout, upload, name="mine"))


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another"},
        {"machine": "vmjobs-0123abcd-" + "d" * 32},
        {"sentinel": "short"},
        {"files": [{"name": "../up", "size": 0}]},
        {"files": [{"name": "no-content", "size": 1}]},
        {"ran": -1},
        {"more": 1},
    ],
)
def test_what_is_no_checkpoint_is_refused(site: Site, change: dict[str, Any]) -> None:
    assert keep(site, **change)[-1].status_code == 422


def test_only_a_job_that_is_to_be_saved_uploads_anything(site: Site) -> None:
    (job,) = site.user().submit()
    site.agent(job).problem(403, "POST", "/v1/uploads", json={"size": 1024})


def test_an_upload_of_a_jobs_is_nobody_elses(site: Site) -> None:
    (job, other) = (site.user().submit(checkpoint=True, hypervisor="qemu")[0] for _ in range(2))
    upload = open_upload(site.agent(job))
    for who in (site.user(), site.agent(other)):
        who.problem(404, "GET", f"/v1/uploads/{upload}")
        who.problem(404, "DELETE", f"/v1/uploads/{upload}")
    assert site.agent(job)("GET", f"/v1/uploads/{upload}").status_code == 200
