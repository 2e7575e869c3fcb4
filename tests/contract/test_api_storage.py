"""The API on S3 storage that dies and comes back."""

from __future__ import annotations

import os
from pathlib import Path

from tests.kit.api_site import ROOT_DISK, make_site
from tests.kit.repository_jobs import digest_of
from tests.kit.s3_server import S3Server
from tests.kit.waiting import wait_until
from vmjobs.model import MIB


def test_files_and_images_in_s3(tmp_path: Path, s3_url: str) -> None:
    site = make_site(tmp_path, storage_url=s3_url)
    user = site.user()
    data = os.urandom(MIB)
    path = f"/v1/blobs/{digest_of(data)}"
    assert [user("PUT", path, data=data).status_code for _ in range(2)] == [201, 200]
    inputs = [{"name": "in", "digest": digest_of(data), "size": len(data)}]
    (job,) = user.submit(inputs=inputs, outputs=["*"])
    attempt, agent = site.stage(job), site.agent(job)
    assert agent("GET", f"/v1/jobs/{job}/inputs/in").data == data
    assert agent("PUT", f"{attempt}/outputs/out", data=data[::-1]).status_code == 201
    part = user("GET", f"/v1/jobs/{job}/outputs/out", headers={"Range": "bytes=5-99999"})
    assert (part.status_code, part.data) == (206, data[::-1][5:100000])
    disk = f"/v1/images/{site.image}/contents/{site.disk}"
    assert user("GET", disk).data == ROOT_DISK
    part = user("GET", disk, headers={"Range": "bytes=70000-80000"})
    assert (part.status_code, part.data) == (206, ROOT_DISK[70000:80001])
    assert not list(tmp_path.glob("objects/**/*"))


def test_storage_that_dies_is_named_and_serves_again_when_it_is_back(
    tmp_path: Path, own_s3_server: S3Server
) -> None:
    bucket = own_s3_server.bucket()
    site = make_site(tmp_path, storage_url=own_s3_server.url(bucket))
    user, data = site.user(), b"data"
    path = f"/v1/blobs/{digest_of(data)}"
    wait_until(lambda: user("GET", "/healthz").get_json()["services"]["storage"] == "ok")
    own_s3_server.kill()
    health = user("GET", "/healthz")
    assert health.status_code == 503
    assert health.get_json()["services"] == {
        "database": "ok",
        "storage": "the storage does not answer",
    }
    problem = user.problem(503, "PUT", path, data=data)
    assert (problem["code"], problem["service"]) == ("UNAVAILABLE", "storage")
    assert bucket not in str(problem)
    assert own_s3_server.endpoint not in str(problem)
    assert user("GET", "/v1/jobs").status_code == 200
    own_s3_server.start()
    wait_until(lambda: user("GET", "/healthz").status_code == 200)
    assert user("PUT", path, data=data).status_code == 201
