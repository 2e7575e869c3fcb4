"""A plain HTTP cache before a site: fetches public images once, never keeps private ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from api.tokens import make_issuer
from images.cache.node_cache import ImageCache
from images.content import SEGMENT_BYTES
from repository.images import LIBRARY, Viewer
from repository.service import open_repository
from tests.kit.counting_proxy import Proxy, proxy_to
from tests.kit.processes import running
from tests.kit.repository_jobs import ADMIN, push
from tests.kit.segments import compute_layout_of_bytes
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until
from vmjobs.client import ImageClient, Retries
from vmjobs.config import Config

#: What docs/images.md tells a site to write, except for addresses and directories.
SQUID = """
http_port 127.0.0.1:{port} accel no-vhost defaultsite={host}
cache_peer {host} parent {peer} 0 no-query no-digest originserver login=PASSTHRU name=vmjobs
acl images urlpath_regex ^/v1/images/sha256:
http_access allow all
cache deny !images
cache_mem 128 MB
maximum_object_size_in_memory 16 MB
maximum_object_size 16 MB
range_offset_limit none images
"""
WHERE = """
visible_hostname cache.site
pid_filename {folder}/pid
access_log stdio:{folder}/access.log
cache_log {folder}/cache.log
coredump_dir {folder}
cache_effective_user proxy
shutdown_lifetime 1 seconds
"""
DISK = os.urandom(2 * SEGMENT_BYTES)
SECRET = os.urandom(SEGMENT_BYTES)
QUICK = Retries(deadline=120, ceiling=0.5)


@dataclass
class Site:
    """A service, the counting proxy before it, a cache before that, and tokens."""

    origin: Proxy
    url: str
    ada: str
    bob: str
    node: str
    public: str
    private: str

    def get(self, path: str, token: str, **headers: str) -> requests.Response:
        """Send a request through the cache."""
        headers = {"Authorization": f"Bearer {token}"} | headers if token else headers
        return requests.get(f"{self.url}{path}", headers=headers, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("service")
    config = Config(data_dir=home / "data", listen=f"127.0.0.1:{free_port()}", api_workers=2)
    with closing(open_repository(config)) as repository:
        wish = {"namespace": LIBRARY, "name": "hep", "visibility": "public"}
        public = push(repository, ADMIN, DISK, **wish).digest
        private = push(repository, Viewer("ada"), SECRET, name="mine").digest
    issuer = make_issuer(config)
    tokens = issuer.user_token("ada"), issuer.user_token("bob"), issuer.node_token("wn1")
    with (
        running(config, home / "log"),
        proxy_to(config.listen) as origin,
        squid(origin.url) as url,
    ):
        yield Site(origin, url, *tokens, public, private)


@contextmanager
def squid(peer: str) -> Iterator[str]:
    """Run Squid before a service; yield its URL. It writes only to its own directory."""
    program = shutil.which("squid")
    assert program, "squid is not installed: this must run, not be skipped"
    folder, port = Path(tempfile.mkdtemp(prefix="vmjobs-squid-")), free_port()
    host, _, number = peer.removeprefix("http://").partition(":")
    text = (SQUID + WHERE).format(port=port, host=host, peer=number, folder=folder)
    (folder / "squid.conf").write_text(text)
    if os.geteuid() == 0:
        shutil.chown(folder, "proxy", "proxy")
    command = [program, "-N", "-f", str(folder / "squid.conf")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url) or process.poll() is not None, 120)
        assert process.poll() is None, (folder / "cache.log").read_text()
        yield url
    finally:
        process.kill()
        process.wait(20)
        shutil.rmtree(folder)


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/healthz", timeout=30).status_code == 200
    except requests.RequestException:
        return False


def paths(image: str, data: bytes) -> list[str]:
    """Every path of an image that a node fetches."""
    layout = compute_layout_of_bytes(data)
    of = f"/v1/images/{image}"
    segments = [f"{of}/segments/{digest.hex()}" for _, digest in layout.stored()]
    return [f"{of}/manifest", f"{of}/contents/{layout.digest}/layout", *segments]


def test_a_public_image_is_fetched_once(site: Site) -> None:
    for path in paths(site.public, DISK):
        first = site.get(path, site.ada)
        assert (first.status_code, first.headers["X-Cache"].split()[0]) == (200, "MISS")
        before = site.origin.down
        second = site.get(path, site.node)
        assert second.headers["X-Cache"].split()[0] == "HIT"
        assert second.content == first.content
        assert site.origin.down == before, "the service was asked again"
        again = site.get(path, site.bob, **{"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, site.origin.down) == (304, before)


def test_ranges_of_what_is_kept(site: Site) -> None:
    path = paths(site.public, DISK)[-1]
    whole = site.get(path, site.ada).content
    before = site.origin.down
    part = site.get(path, site.bob, Range="bytes=1000-1999")
    assert (part.status_code, part.content) == (206, whole[1000:2000])
    assert site.origin.down == before


def test_a_private_image_is_never_kept(site: Site) -> None:
    for path in paths(site.private, SECRET):
        for _ in range(2):
            before = site.origin.down
            answer = site.get(path, site.ada)
            assert (answer.status_code, answer.headers["X-Cache"].split()[0]) == (200, "MISS")
            assert site.origin.down - before > len(answer.content)
        assert site.get(path, site.bob).status_code == 404
        assert site.get(path, "").status_code == 401
        assert site.get(path, site.node).headers["X-Cache"].split()[0] == "MISS"


def test_a_refusal_is_not_kept(site: Site) -> None:
    path = f"/v1/images/{site.private}/manifest"
    assert site.get(path, site.bob).status_code == 404
    assert site.get(path, site.ada).status_code == 200
    assert site.get("/v1/images", site.ada).headers["X-Cache"].split()[0] == "MISS"


def test_a_second_node_of_the_site_costs_the_service_nothing(site: Site, tmp_path: Path) -> None:
    for number in (1, 2):
        client = ImageClient(site.url, site.node, retries=QUICK)
        before = site.origin.down
        cache = ImageCache(tmp_path / f"node{number}", client)
        image = cache.prepare(site.public)
        assert image.root.read_bytes() == DISK
        moved = site.origin.down - before
    assert moved < 10_000
