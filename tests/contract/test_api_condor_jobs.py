"""Checkpoints of transparent jobs over the REST interface: what each token permits."""

from __future__ import annotations

from typing import Any

import pytest

from images.content import ContentLayout
from images.segment import decode_segment
from tests.kit.api_images import DISK, open_upload, publication, put_content
from tests.kit.api_site import Caller, Site
from tests.kit.checkpoints import saved

pytestmark = pytest.mark.in_process

JOB, OTHER = "htc" + "a" * 29, "htc" + "b" * 29
FIRST, SECOND = "1" * 32, "2" * 32
MAKING = {
    "named": "hep:1",
    "image": "sha256:" + "c" * 64,
    "door": "d" * 32,
    "cpus": 1,
    "memory": 256,
    "disk": 1024,
    "network": "repository",
}


def claimed(site: Site, attempt: str = FIRST, job: str = JOB) -> tuple[Caller, dict[str, Any] | None]:
    """Claim an attempt; return a caller with the job's new token, and the job's checkpoint."""
    body = {"attempt": attempt, "owner": "ada@grid"}
    answer = site.node("node1")("POST", f"/v1/condor-jobs/{job}/attempts", json=body)
    assert answer.status_code == 201, answer.text
    ticket = answer.get_json()
    return site.caller(ticket["token"]), ticket["checkpoint"]


def sent(site: Site) -> tuple[Caller, ContentLayout, str, dict[str, Any]]:
    """Upload a VM in the job's first attempt; return a caller, the layout, and the checkpoint.

    The checkpoint is a path and a document.
    """
    who, found = claimed(site)
    assert found is None
    upload = open_upload(who)
    layout = put_content(who, upload, DISK)
    path = f"/v1/condor-jobs/{JOB}/attempts/{FIRST}/checkpoint?upload={upload}"
    return who, layout, path, saved(FIRST, layout).model_dump(mode="json") | {"making": MAKING}


def kept(site: Site) -> tuple[Caller, ContentLayout]:
    """Save a job's VM in its first attempt; return a caller with its token, and the layout."""
    who, layout, path, document = sent(site)
    answer = who("PUT", path, json=document)
    assert answer.status_code == 204, answer.text
    return who, layout


def test_another_node_fetches_what_one_has_kept(site: Site) -> None:
    _, layout = kept(site)
    who, found = claimed(site, SECOND)
    assert found is not None
    assert (found["ran"], found["making"]) == (12.5, MAKING)
    there = f"/v1/condor-jobs/{JOB}/checkpoint"
    assert who("GET", f"{there}/contents/{layout.digest}/layout").data == layout.to_bytes()
    for number, digest in layout.stored():
        piece = decode_segment(who("GET", f"{there}/segments/{digest.hex()}").data, digest)
        assert piece == DISK[number * layout.length(0) :][: layout.length(number)]


def test_a_node_that_was_replaced_is_told_so(site: Site) -> None:
    who, layout = kept(site)
    claimed(site, SECOND)
    mine = f"/v1/condor-jobs/{JOB}/attempts/{FIRST}"
    upload = open_upload(who)
    put_content(who, upload, DISK)
    late = saved(FIRST, layout).model_dump(mode="json") | {"making": MAKING, "ran": 99.0}
    for method, path, more in (
        ("PUT", f"{mine}/checkpoint?upload={upload}", {"json": late}),
        ("POST", f"{mine}/not-resumed", {}),
        ("DELETE", mine, {}),
    ):
        assert who.problem(409, method, path, **more)["code"] == "ATTEMPT_SUPERSEDED"


def test_nobody_else_claims_reads_or_ends_it(site: Site) -> None:
    who, layout = kept(site)
    theirs, _ = claimed(site, job=OTHER)
    (job,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    mine = f"/v1/condor-jobs/{JOB}"
    claim = {"attempt": SECOND, "owner": "ada@grid"}
    for other in (site.user(), site.admin(), who, theirs, site.agent(job)):
        other.problem(403, "POST", f"{mine}/attempts", json=claim)
    for method, path in (
        ("GET", f"{mine}/checkpoint/contents/{layout.digest}/layout"),
        ("GET", f"{mine}/checkpoint/segments/{next(layout.stored())[1].hex()}"),
        ("POST", f"{mine}/attempts/{FIRST}/not-resumed"),
        ("DELETE", f"{mine}/attempts/{FIRST}"),
    ):
        for other in (site.user(), site.admin(), site.node("node1"), theirs, site.agent(job)):
            other.problem(403, method, path)
        site.caller().problem(401, method, path)
    assert claimed(site, SECOND)[1] is not None


def test_no_job_of_the_services_can_be_claimed_like_that(site: Site) -> None:
    """A node's token must not give it the token of any job that the service has."""
    (job,) = site.user().submit(checkpoint=True, hypervisor="qemu")
    claim = {"attempt": SECOND, "owner": "ada@grid"}
    for wrong in (job, "a" * 32, "htc" + "A" * 29, "htc" + "a" * 30):
        site.node("node1").problem(422, "POST", f"/v1/condor-jobs/{wrong}/attempts", json=claim)


def test_its_token_is_good_for_nothing_else(site: Site) -> None:
    """Not even for images, which the node reads."""
    who, _ = claimed(site)
    upload = open_upload(who)
    layout = put_content(who, upload, b"a disk")
    who.problem(403, "POST", "/v1/images", json=publication(layout, upload, name="mine"))
    who.problem(404, "GET", f"/v1/images/{site.image}/manifest")


def test_when_the_job_is_over_so_is_its_token(site: Site) -> None:
    who, layout = kept(site)
    assert who("DELETE", f"/v1/condor-jobs/{JOB}/attempts/{FIRST}").status_code == 204
    who.problem(404, "GET", f"/v1/condor-jobs/{JOB}/checkpoint/contents/{layout.digest}/layout")
    who.problem(404, "POST", "/v1/uploads", json={"size": 1})
    assert claimed(site, SECOND)[1] is None


def test_what_is_no_checkpoint_is_refused(site: Site) -> None:
    who, _, path, document = sent(site)
    changes: tuple[dict[str, Any], ...] = (
        {"making": None},
        {"making": MAKING | {"door": "short"}},
        {"making": MAKING | {"memory": 0}},
        {"machine": "vmjobs-0123abcd-" + "9" * 32},
        {"more": 1},
    )
    for change in changes:
        who.problem(422, "PUT", path, json=document | change)
    assert who("PUT", path, json=document).status_code == 204
