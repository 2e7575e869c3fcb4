"""Checkpoints of jobs over the REST interface: what a job's token permits."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from images.content import ContentLayout
from images.segment import decode_segment
from tests.kit.api_images import DISK, open_upload, publication, put_content
from tests.kit.api_site import Caller, Site, report_of
from tests.kit.checkpoints import saved
from vmjobs.model import JobState

pytestmark = pytest.mark.in_process

S = JobState


def claimed(who: Caller, job: str) -> str:
    """Bring a job on a node to RUNNING; return its attempt."""
    attempt = secrets.token_hex(16)
    answer = who("POST", f"/v1/jobs/{job}/attempts", json={"attempt": attempt, "node": "node1"})
    assert answer.status_code == 201, answer.text
    for state in (S.STAGING, S.BOOTING, S.RUNNING):
        path = f"/v1/jobs/{job}/attempts/{attempt}/reports"
        assert who("POST", path, json=report_of(state)).status_code == 204
    return attempt


def sent(site: Site) -> tuple[str, Caller, ContentLayout, str, dict[str, Any]]:
    """Upload a job's VM; return the job, a caller with its token, the VM's layout, and its checkpoint.

    The checkpoint is a path and a document.
    """
    (job,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    who = site.agent(job)
    attempt = claimed(who, job)
    upload = open_upload(who)
    layout = put_content(who, upload, DISK)
    path = f"/v1/jobs/{job}/attempts/{attempt}/checkpoint?upload={upload}"
    return job, who, layout, path, saved(attempt, layout).model_dump(mode="json")


def keep(site: Site) -> tuple[str, Caller, ContentLayout]:
    """Save a job's VM; return the job, a caller with its token, and the VM's layout."""
    job, who, layout, path, document = sent(site)
    answer = who("PUT", path, json=document)
    assert answer.status_code == 204, answer.text
    return job, who, layout


def test_a_jobs_token_keeps_its_vm_and_fetches_it(site: Site) -> None:
    job, who, layout = keep(site)
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
    job, _, layout = keep(site)
    (other,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    digest = next(digest for _, digest in layout.stored())
    for path in (f"contents/{layout.digest}/layout", f"segments/{digest.hex()}"):
        mine, theirs = f"/v1/jobs/{job}/checkpoint/{path}", f"/v1/jobs/{other}/checkpoint/{path}"
        for who in (site.user(), site.admin(), site.node("node1"), site.agent(other)):
            who.problem(403, "GET", mine)
        site.agent(other).problem(404, "GET", theirs)
        site.caller().problem(401, "GET", mine)


def test_what_is_no_checkpoint_is_refused(site: Site) -> None:
    _, who, _, path, document = sent(site)
    for change in (
        {"machine": "another"},
        {"machine": "vmjobs-0123abcd-" + "d" * 32},
        {"sentinel": "short"},
        {"files": [{"name": "../up", "size": 0}]},
        {"files": [{"name": "no-content", "size": 1}]},
        {"ran": -1},
        {"more": 1},
    ):
        who.problem(422, "PUT", path, json=document | change)
    assert who("PUT", path, json=document).status_code == 204


def test_a_jobs_token_uploads_its_vm_alone(site: Site) -> None:
    (job,) = site.user().submit()
    site.agent(job).problem(403, "POST", "/v1/uploads", json={"size": 1024})
    (saved,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    who = site.agent(saved)
    upload = open_upload(who)
    layout = put_content(who, upload, b"a disk")
    who.problem(403, "POST", "/v1/images", json=publication(layout, upload, name="mine"))
