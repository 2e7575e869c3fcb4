"""Images over REST: names, permissions, and bytes in a form that suits caches."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from api.tokens import Scope
from repository.images import Viewer
from tests.kit.api_images import DISK, OCTETS, pieces, publication, push, put_content
from tests.kit.api_site import Site
from tests.kit.repository_jobs import images_of

pytestmark = pytest.mark.in_process

NOTHING = "sha256:" + "0" * 64


@pytest.fixture
def image(site: Site) -> str:
    """Ada's private image, ``muons:latest``."""
    return str(push(site.user())["digest"])


def disk_of(shown: dict[str, Any]) -> str:
    return str(shown["manifest"]["root"]["digest"])


def ways_to(digest: str, content: str, segment: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every way to see or change an image."""
    of = f"/v1/images/{digest}"
    return [
        ("GET", of, {}),
        ("GET", "/v1/images/ada/muons", {}),
        ("GET", "/v1/images/ada/muons:latest", {}),
        ("GET", f"{of}/manifest", {}),
        ("GET", f"{of}/signature", {}),
        ("GET", f"{of}/contents/{content}", {}),
        ("GET", f"{of}/contents/{content}/layout", {}),
        ("GET", f"{of}/segments/{segment}", {}),
        ("PATCH", of, {"json": {"visibility": "public"}}),
        ("DELETE", of, {}),
        ("PUT", "/v1/tags/_/mine/latest", {"json": {"digest": digest}}),
        ("POST", f"{of}/verify", {"data": bytes.fromhex(segment), "content_type": OCTETS}),
        ("POST", f"{of}/prefetch", {"json": {"site": "s"}}),
    ]


def test_an_image_is_pushed_listed_and_shown(site: Site) -> None:
    ada = site.user()
    shown = push(ada, origin={"file": "muons.qcow2", "format": "qcow2"})
    assert shown["tags"] == [{"namespace": "ada", "name": "muons", "tag": "latest"}]
    assert (shown["owner"], shown["visibility"], shown["size"]) == ("ada", "private", len(DISK))
    assert shown["stored"] < shown["size"]
    assert shown["origin"]["file"] == "muons.qcow2"
    for ref in ("muons", "muons:latest", "ada/muons", "ada/muons:latest", shown["digest"]):
        assert ada("GET", f"/v1/images/{ref}").get_json()["digest"] == shown["digest"]
    listed = {
        (e["namespace"], e["name"], e["tag"]) for e in ada("GET", "/v1/images").get_json()["images"]
    }
    assert listed == {("ada", "muons", "latest"), ("library", "tiny", "latest")}


def test_the_same_image_again_is_fine_and_said_so(site: Site) -> None:
    ada = site.user()
    first = push(ada)
    upload = ada("POST", "/v1/uploads", json={"size": 1}).get_json()["id"]
    layout = put_content(ada, upload, DISK, segments=False)
    answer = ada("POST", "/v1/images", json=publication(layout, upload, name="muons", tag="v2"))
    assert (answer.status_code, answer.get_json()["digest"]) == (200, first["digest"])
    assert [tag["tag"] for tag in answer.get_json()["tags"]] == ["latest", "v2"]


def test_images_whose_names_look_like_our_urls(site: Site) -> None:
    ada = site.user()
    for name in ("manifest", "segments", "contents", "layout"):
        digest = push(ada, name, name.encode())["digest"]
        assert ada("GET", f"/v1/images/ada/{name}").get_json()["digest"] == digest


#: Names that a URL may alter; the repository's tests cover other bad names.
BAD_NAMES = [
    *("", ".", "..", "../x", "..%2Fx", "a/../b", "a b", "a\n", "a\0", "a:b:c", "a:", ":t", "a/b/c"),
    *("muöns", "muons\u202e", "%2e%2e", "a\\b", "sha256:abc", "tree:" + "0" * 64),
]


def test_bad_names(site: Site) -> None:
    ada, body = site.user(), {"json": {"digest": site.image}}
    upload = ada("POST", "/v1/uploads", json={"size": len(DISK)}).get_json()["id"]
    layout = put_content(ada, upload, DISK)
    for name in BAD_NAMES:
        escaped = quote(name, safe="")
        if name:
            assert ada("GET", f"/v1/images/{escaped}").status_code in {404, 422}, name
            wish = publication(layout, upload, name=name)
            ada.problem(422, "POST", "/v1/images", json=wish)
        assert ada("GET", f"/v1/images/ada/{escaped}").status_code in {404, 422}, name
        for path in (f"ada/{escaped}/latest", f"ada/x/{escaped}"):
            assert ada("PUT", f"/v1/tags/{path}", **body).status_code in {404, 422}, name
    assert [e for e in images_of(site.repository, Viewer("ada")) if e.namespace == "ada"] == []


def test_somebody_elses_private_image_does_not_exist(site: Site, image: str) -> None:
    ada, bob = site.user(), site.user("bob", "/cms")
    content = disk_of(ada("GET", f"/v1/images/{image}").get_json())
    segment = next(iter(pieces(DISK))).hex()
    for method, path, more in ways_to(image, content, segment):
        problem = bob.problem(404, method, path, **more)
        assert problem["code"] == "NOT_FOUND"
        missing = bob(method, path.replace(image, NOTHING), **more)
        assert missing.status_code == 404, "an image that is there must look like one that is not"
    listed = bob("GET", "/v1/images").get_json()["images"]
    assert [entry["name"] for entry in listed] == ["tiny"]
    problem = bob.problem(422, "POST", "/v1/jobs", json={"spec": {"image": image, "script": "true"}})
    assert problem["errors"][0]["field"] == "spec.image"


def test_shared_with_a_group(site: Site, image: str) -> None:
    ada, member, other = site.user(), site.user("bob", "/atlas"), site.user("eve", "/atlas2")
    change = {"shares": [{"kind": "group", "name": "/atlas"}]}
    assert ada("PATCH", f"/v1/images/{image}", json=change).get_json()["shares"] == change["shares"]
    shown = member("GET", "/v1/images/ada/muons").get_json()
    assert (shown["digest"], shown["shares"]) == (image, [])
    assert member("GET", f"/v1/images/{image}/manifest").status_code == 200
    assert any(e["digest"] == image for e in member("GET", "/v1/images").get_json()["images"])
    other.problem(404, "GET", f"/v1/images/{image}")
    (job,) = member.submit(image="ada/muons", hypervisor="uml")
    assert member("GET", f"/v1/jobs/{job}").get_json()["image_digest"] == image
    ada("PATCH", f"/v1/images/{image}", json={"shares": []})
    member.problem(404, "GET", f"/v1/images/{image}")


def test_scopes(site: Site) -> None:
    may = {
        Scope.COMPUTE_READ: {"list"},
        Scope.STORAGE_READ: {"list", "bytes"},
        Scope.STORAGE_CREATE: {"upload"},
        Scope.STORAGE_MODIFY: {"tag"},
        Scope.ADMIN: {"gc"},
        Scope.COMPUTE_CREATE: set(),
    }
    tries: dict[str, tuple[str, str, dict[str, Any]]] = {
        "list": ("GET", "/v1/images", {}),
        "bytes": ("GET", f"/v1/images/{site.image}/manifest", {}),
        "upload": ("POST", "/v1/uploads", {"json": {"size": 1}}),
        "tag": ("PUT", "/v1/tags/_/x/y", {"json": {"digest": site.image}}),
        "gc": ("POST", "/v1/gc?dry_run=true", {}),
    }
    for scope, allowed in may.items():
        who = site.caller(site.issuer.user_token("ada", {scope}))
        for name, (method, path, more) in tries.items():
            status = who(method, path, **more).status_code
            assert (status < 300) == (name in allowed), (scope, name, status)
            assert status < 300 or status == 403
    site.admin().problem(422, "POST", "/v1/gc?dry_run=perhaps")


def test_nodes_read_and_jobs_read_their_own(site: Site, image: str) -> None:
    (job,) = site.user().submit(image="muons", hypervisor="uml")
    for who in (site.caller(site.issuer.node_token("wn1")), site.agent(job)):
        assert who("GET", f"/v1/images/{image}/manifest").status_code == 200
        segment = next(iter(pieces(DISK))).hex()
        assert who("GET", f"/v1/images/{image}/segments/{segment}").status_code == 200
        who.problem(403, "POST", "/v1/uploads", json={"size": 1})
        who.problem(403, "DELETE", f"/v1/images/{image}")
    site.agent(job).problem(404, "GET", f"/v1/images/{site.image}/manifest")
    assert site.user().problem(409, "DELETE", f"/v1/images/{image}")["code"] == "IMAGE_IN_USE"
    site.user()("DELETE", f"/v1/jobs/{job}")
    problem = site.agent(job).problem(409, "GET", f"/v1/images/{image}/manifest")
    assert problem["code"] == "JOB_FINAL"


def test_prefetch_reaches_the_nodes_of_a_site(site: Site, image: str) -> None:
    def announce(name: str, where: str, *images: str) -> list[str]:
        body = {"name": name, "site": where, "cpus": 1, "memory": 1000, "disk": 1000}
        body |= {"images": list(images), "updated": "2026-01-01T00:00:00Z"}
        answer = site.caller(site.issuer.node_token(name))("PUT", f"/v1/nodes/{name}", json=body)
        assert answer.status_code == 200
        wishes: list[str] = answer.get_json()["prefetch"]
        return wishes

    ada, path = site.user(), f"/v1/images/{image}/prefetch"
    for name, where in (("wn1", "desy"), ("wn2", "desy"), ("wn3", "cern")):
        assert announce(name, where) == []
    wanted = ada("POST", path, json={"site": "desy"}).get_json()
    assert wanted == {"wanted": ["wn1", "wn2"], "cached": []}
    assert (announce("wn1", "desy"), announce("wn3", "cern")) == ([image], [])
    assert announce("wn1", "desy", image) == []
    for user, readable in ((ada, [image]), (site.user("bob"), [])):
        assert user("GET", "/v1/nodes").get_json()["nodes"][0]["images"] == readable
        assert user("GET", "/v1/nodes/wn1").get_json()["images"] == readable


@pytest.mark.parametrize("public", [True, False])
def test_bytes_for_caches(site: Site, public: bool) -> None:
    ada = site.user()
    shown = push(ada, visibility="public" if public else "private")
    of, content = f"/v1/images/{shown['digest']}", disk_of(shown)
    segment = next(iter(pieces(DISK))).hex()
    for path, etag in {
        f"{of}/manifest": shown["digest"],
        f"{of}/contents/{content}": content,
        f"{of}/contents/{content}/layout": f"{content}/layout",
        f"{of}/segments/{segment}": segment,
    }.items():
        answer = ada("GET", path)
        assert answer.headers["ETag"] == f'"{etag}"'
        words = {word.strip() for word in answer.headers["Cache-Control"].split(",")}
        assert words == {"public" if public else "private", "max-age=31536000", "immutable"}
        again = ada("GET", path, headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")
        part = ada("GET", path, headers={"Range": "bytes=3-9"})
        assert (part.status_code, part.data) == (206, answer.data[3:10])
        assert part.headers["Content-Range"] == f"bytes 3-9/{len(answer.data)}"
        tail = ada("GET", path, headers={"Range": "bytes=-4"})
        assert tail.data == answer.data[-4:]
        ada.problem(416, "GET", path, headers={"Range": f"bytes={len(answer.data)}-"})
        assert ada("HEAD", path).headers["Content-Length"] == str(len(answer.data))
        site.caller().problem(401, "GET", path)


def test_bytes_that_are_not_to_be_had(site: Site, image: str) -> None:
    ada = site.user()
    of = f"/v1/images/{image}"
    for path in (
        *(f"{of}/contents/{site.disk}", f"{of}/contents/{site.disk}/layout", f"{of}/contents"),
        *(f"{of}/segments/{'0' * 64}", f"/v1/images/{NOTHING}/manifest"),
    ):
        ada.problem(404, "GET", path)
    for path in (
        f"{of}/segments/{'0' * 63}",
        f"{of}/contents/tree:zz",
        "/v1/images/sha256:zz/manifest",
    ):
        ada.problem(422, "GET", path)


def test_a_damaged_block_is_found_and_named(site: Site) -> None:
    ada = site.user()
    shown = push(ada)
    first, second = pieces(DISK)
    verify = f"/v1/images/{shown['digest']}/verify"
    both = {"data": first + second, "content_type": OCTETS}
    assert ada("POST", verify, **both).get_json() == {"checked": 2, "damaged": [], "missing": []}
    objects = site.repository.objects
    (key,) = [info.key for info in objects.keys("segments") if first.hex() in info.key]
    objects.put_bytes(key, objects.get(key)[:-1] + b"?")
    (damaged,) = ada("POST", verify, **both).get_json()["damaged"]
    assert (damaged["segment"], bool(damaged["why"])) == (first.hex(), True)
    for data in (b"\1" * 32, b"\1" * 31, b""):
        ada.problem(422, "POST", verify, data=data, content_type=OCTETS)
    ada.problem(413, "POST", verify, data=bytes(32 * 65), content_type=OCTETS)
