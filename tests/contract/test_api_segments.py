"""The fast path for segments: it answers and refuses as the application does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gunicorn.http.wsgi import FileWrapper
from werkzeug.test import TestResponse

from api.app import create_app
from api.tokens import ApiTokenIssuer, Scope
from repository.storage.objects.s3 import S3Objects
from tests.kit.api_images import DISK, pieces, push
from tests.kit.api_site import Caller, Site, make_site
from tests.kit.repository_jobs import statements
from tests.kit.waiting import Clock

pytestmark = pytest.mark.in_process

SEGMENT = next(iter(pieces(DISK))).hex()
#: As in the real service, where gunicorn has the kernel copy files.
SERVER = {"wsgi.file_wrapper": FileWrapper}


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Site:
    """A site whose token issuer uses the test's clock."""
    clock.now = 2e9
    made = make_site(tmp_path)
    issuer = ApiTokenIssuer(tmp_path / "keys" / "issuer.pem", made.config.issuer, clock)
    app = create_app(made.config, made.repository, dispatcher=made.queue, issuer=issuer)
    return Site(app, made.config, made.repository, made.queue, issuer, made.image, made.disk)


@pytest.fixture
def image(request: pytest.FixtureRequest, site: Site) -> str:
    return str(push(site.user(), visibility=getattr(request, "param", "private"))["digest"])


@pytest.fixture
def path(image: str) -> str:
    return f"/v1/images/{image}/segments/{SEGMENT}"


def get(who: Caller, path: str, **headers: str) -> TestResponse:
    """The answer to a request as the server passes it on; in headers, ``_`` stands for ``-``."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return who("GET", path, headers=named, environ_overrides=SERVER)


def sent(answer: TestResponse) -> bytes:
    """The body as the server sends it: of a file, as many bytes as were announced."""
    return bytes(answer.data[: answer.content_length])


def plainly(who: Caller, path: str, **headers: str) -> TestResponse:
    """The same, if no server copies files: the application's own answer."""
    return who("GET", path, headers={n.replace("_", "-"): v for n, v in headers.items()})


RANGES: list[dict[str, str]] = [
    {},
    {"Range": "bytes=0-0"},
    {"Range": "bytes=100-199"},
    {"Range": "bytes=100-"},
    {"Range": "bytes=-7"},
    {"Range": "bytes=5-999999999"},
    {"Range": "bytes=9-3"},
    {"Range": "bytes=0-1,5-6"},
    {"Range": "lines=1-2"},
]


OTHERS: list[dict[str, str]] = [
    {"Range": "bytes=99999999-"},
    {"If_None_Match": f'"{SEGMENT}"'},
    {"If_None_Match": '"another"'},
    {"If_Range": f'"{SEGMENT}"', "Range": "bytes=1-2"},
    {"If_Range": '"another"', "Range": "bytes=1-2"},
    {"Authorization": "Bearer x.y.z"},
    {"Authorization": "Basic abc"},
]


@pytest.mark.parametrize("image", ["private", "public"], indirect=True)
def test_it_is_the_applications_answer(site: Site, path: str) -> None:
    who = site.user()
    for headers in RANGES + OTHERS:
        wanted = plainly(who, path, **headers)
        with statements(site.repository.database) as asked:
            got = get(who, path, **headers)
        assert headers in OTHERS or not asked, "all of it was known"
        assert (got.status, sent(got)) == (wanted.status, wanted.data), headers
        assert sorted(got.headers) == sorted(wanted.headers), headers


def test_what_is_asked_otherwise(site: Site, path: str) -> None:
    who = site.user()
    size = len(get(who, path).data)
    head = who("HEAD", path, environ_overrides=SERVER)
    assert (head.status_code, head.data, head.content_length) == (200, b"", size)
    for method in ("POST", "PUT", "DELETE"):
        assert who(method, path, environ_overrides=SERVER).status_code == 405
    who.problem(422, "GET", path[:-1], environ_overrides=SERVER)
    who.problem(404, "GET", path[:-1] + ("0" if path[-1] != "0" else "1"), environ_overrides=SERVER)
    who.problem(404, "GET", path + "/", environ_overrides=SERVER)


def test_a_token_that_has_expired_is_refused_however_well_known(
    site: Site, clock: Clock, path: str
) -> None:
    who = site.caller(site.issuer.user_token("ada", lifetime=60))
    assert [get(who, path).status_code for _ in range(3)] == [200, 200, 200]
    clock.now += 60
    problem = who.problem(401, "GET", path, environ_overrides=SERVER)
    assert "expired" in problem["detail"]
    assert get(site.user(), path).status_code == 200


def test_a_token_counts_by_every_byte(site: Site, path: str) -> None:
    who = site.user()
    assert get(who, path).status_code == 200
    head, body, sign = who.token.split(".")
    for token in (f"{head}.{body}.{sign[::-1]}", f"{head}.{body}.", f"{head}.{body}"):
        site.caller(token).problem(401, "GET", path, environ_overrides=SERVER)
    site.caller().problem(401, "GET", path, environ_overrides=SERVER)
    narrow = site.caller(site.issuer.user_token("ada", {Scope.COMPUTE_READ}))
    narrow.problem(403, "GET", path, environ_overrides=SERVER)
    assert get(who, path).status_code == 200


def test_somebody_else_does_not_come_in_behind(site: Site) -> None:
    image = push(site.user())["digest"]
    path = f"/v1/images/{image}/segments/{SEGMENT}"
    for who in (site.user(), site.caller(site.issuer.node_token("wn1")), site.admin()):
        assert [get(who, path).status_code for _ in range(2)] == [200, 200]
    site.user("bob").problem(404, "GET", path, environ_overrides=SERVER)
    # An image of bob's own gives no access to the segments of another.
    own = push(site.user("bob"), data=b"bob's" * 1000)["digest"]
    bob = site.user("bob")
    mine = next(iter(pieces(b"bob's" * 1000))).hex()
    assert get(bob, f"/v1/images/{own}/segments/{mine}").status_code == 200
    bob.problem(404, "GET", f"/v1/images/{own}/segments/{SEGMENT}", environ_overrides=SERVER)


def test_a_jobs_token_ends_with_its_job(site: Site, path: str) -> None:
    ada = site.user()
    (job,) = ada.submit(image="muons", hypervisor="uml")
    agent = site.agent(job)
    assert [get(agent, path).status_code for _ in range(3)] == [200, 200, 200]
    ada("DELETE", f"/v1/jobs/{job}")
    problem = agent.problem(409, "GET", path, environ_overrides=SERVER)
    assert problem["code"] == "JOB_FINAL"


def test_files_are_closed(site: Site, path: str) -> None:
    who = site.user()

    def open_files() -> set[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return {str(link.readlink()) for link in links if SEGMENT in str(link.readlink())}

    answers: list[Any] = [get(who, path, **headers) for headers in RANGES]
    for answer in answers:
        assert answer.data
        answer.close()
    get(who, path, Range="bytes=99999999-").close()
    assert not open_files()


def test_a_segment_in_s3_is_asked_for_once(tmp_path: Path, s3_url: str) -> None:
    site = make_site(tmp_path, storage_url=s3_url)
    who = site.user()
    path = f"/v1/images/{push(who)['digest']}/segments/{SEGMENT}"
    whole = get(who, path).data  # all of its metadata is known from now on
    objects = site.repository.objects
    assert isinstance(objects, S3Objects)
    asked: list[str] = []

    def note(model: Any, **_: object) -> None:
        asked.append(model.name)

    objects._client.meta.events.register("before-call.s3", note)
    assert get(who, path).data == whole
    assert asked == ["GetObject"]
    asked.clear()
    assert get(who, path, Range="bytes=100-199").data == whole[100:200]
    assert asked == ["GetObject"] * 2  # one for the size, one for the range
