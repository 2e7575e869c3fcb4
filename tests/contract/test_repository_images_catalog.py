"""Names, owners and expiry of images: who may see and who may change them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import update

from images.signature import sign
from repository.images import Viewer
from repository.images.tables import HoldingRow
from repository.service import Repository
from tests.kit.cluster_nodes import node_of
from tests.kit.noise import noise
from tests.kit.repository_images import ADA, BOB, EVE, layout, manifest_of, read, sweeper
from tests.kit.repository_jobs import ADMIN, images_of, push, refused, send, with_settings
from vmjobs.errors import Forbidden, ImageRejected, InvalidRequest, NotFound
from vmjobs.model import now
from vmjobs.wire import (
    MAX_SHARES,
    ImageChange,
    ImageDetail,
    Origin,
    PrefetchRequest,
    Publication,
    Share,
    Visibility,
)

pytestmark = pytest.mark.in_process

NODE = Viewer("node1", node=True)
DISK = noise(1000)


def names(images: Repository, viewer: Viewer) -> list[str]:
    return [f"{i.namespace}/{i.name}:{i.tag}" for i in images_of(images, viewer)]


def sees(images: Repository, viewer: Viewer, done: ImageDetail) -> bool:
    """Whether the viewer can read the image; check that all queries agree."""
    content = done.manifest["root"]["digest"]
    answers = []
    for ask in (
        lambda: images.catalog.detail(viewer, done.digest),
        lambda: images.catalog.resolve(viewer, done.digest),
        lambda: images.catalog.manifest(viewer, done.digest),
        lambda: images.contents.layout(viewer, done.digest, content),
        lambda: images.contents.open_segment(viewer, done.digest, layout(DISK).segments[0]).close(),
        lambda: images.contents.verify(viewer, done.digest, []),
        lambda: images.catalog.visibility(viewer, done.digest),
        lambda: images.catalog.signature(viewer, done.digest),
    ):
        try:
            ask()
            answers.append(True)
        except NotFound:
            answers.append(False)
    assert len(set(answers)) == 1
    return answers[0]


def expire(images: Repository, digest: str) -> None:
    with images.database.write() as session:
        past = now() - timedelta(days=1)
        session.execute(update(HoldingRow).where(HoldingRow.image == digest).values(expires=past))


def test_a_private_image_is_nobody_elses(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep")
    assert sees(images, ADA, done)
    assert sees(images, NODE, done)
    assert sees(images, ADMIN, done)
    assert sees(images, Viewer("any", image=done.digest), done)
    assert not sees(images, Viewer("ada", image="sha256:" + "0" * 64), done)
    assert not sees(images, EVE, done)
    assert names(images, EVE) == []
    refused(
        NotFound,
        lambda: images.catalog.resolve(EVE, "ada/hep"),
        lambda: images.catalog.resolve(EVE, "hep"),
        lambda: images.catalog.change(EVE, done.digest, ImageChange(visibility=Visibility.PUBLIC)),
        lambda: images.catalog.remove(EVE, done.digest),
        lambda: images.catalog.tag(EVE, "", "mine", "latest", done.digest),
        lambda: images.prefetcher.request(EVE, done.digest, PrefetchRequest()),
    )


def test_publishing_again_and_again_adds_shares_up_to_their_limit(images: Repository) -> None:
    def publish(first: int, count: int) -> ImageDetail:
        shares = [{"kind": "user", "name": f"u{n}"} for n in range(first, first + count)]
        return push(images, ADA, DISK, name="hep", shares=shares)

    publish(0, 60)
    assert len(publish(50, 50).shares) == MAX_SHARES
    with pytest.raises(InvalidRequest, match="shared with 101 users and groups; it may be with 100"):
        publish(100, 1)
    assert len(publish(0, 100).shares) == MAX_SHARES  # existing shares count once


def test_shares_and_visibility(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep", shares=[{"kind": "user", "name": "bob"}])
    assert sees(images, BOB, done)
    assert images.catalog.detail(BOB, "ada/hep").owner == "ada"
    assert images.catalog.detail(BOB, "ada/hep").shares == ()  # only ada sees all shares
    assert images.catalog.detail(ADA, "hep").shares == (Share(kind="user", name="bob"),)
    atlas = Viewer("eve", frozenset({"/atlas", "/cms"}))
    images.catalog.change(ADA, done.digest, ImageChange(shares=(Share(kind="group", name="/atlas"),)))
    assert not sees(images, BOB, done)
    assert sees(images, atlas, done)
    assert not sees(images, EVE, done)
    assert not sees(images, Viewer("/atlas"), done)
    images.catalog.change(ADA, done.digest, ImageChange(shares=(), visibility=Visibility.PUBLIC))
    assert sees(images, EVE, done)
    assert images.catalog.visibility(EVE, done.digest) is Visibility.PUBLIC
    assert names(images, EVE) == ["ada/hep:latest"]
    refused(
        Forbidden,
        lambda: images.catalog.change(EVE, done.digest, ImageChange(deprecated="ha")),
        lambda: images.catalog.remove(EVE, done.digest),
    )
    images.catalog.change(ADA, done.digest, ImageChange(visibility=Visibility.PRIVATE))
    assert not sees(images, EVE, done)


@pytest.mark.both_databases
def test_two_who_bring_the_same(images: Repository) -> None:
    hers = push(images, ADA, DISK, name="secret-plans", origin={"file": "plans.img"})
    his = push(images, BOB, DISK, name="hep")
    assert hers.digest == his.digest
    assert (his.owner, his.origin, len(his.tags)) == ("bob", Origin(), 1)
    assert names(images, BOB) == ["bob/hep:latest"]
    images.catalog.remove(ADA, hers.digest)
    assert not sees(images, ADA, hers)
    sweeper(images).garbage_collector.collect()
    assert read(images, BOB, his) == DISK
    images.catalog.remove(BOB, his.digest)
    assert not sees(images, ADMIN, his)
    report = sweeper(images).garbage_collector.collect()
    assert (report.contents, report.segments) == (1, 1)
    assert list(images.objects.keys("segments")) == []


@pytest.mark.both_databases
def test_names(images: Repository) -> None:
    one, two = push(images, ADA, DISK, name="hep"), push(images, ADA, noise(9), name="hep", tag="v2")
    assert (
        images.catalog.resolve(ADA, "hep")
        == images.catalog.resolve(ADA, "ada/hep:latest")
        == one.digest
    )
    assert images.catalog.resolve(ADA, "hep:v2") == two.digest
    images.catalog.tag(ADA, "ada", "hep", "latest", two.digest)  # a tag moves
    assert images.catalog.resolve(ADA, "hep") == two.digest
    assert [t.tag for t in images.catalog.detail(ADA, "hep").tags] == ["latest", "v2"]
    assert sees(images, ADA, one)
    assert sorted(names(images, ADA)) == ["ada/:", "ada/hep:latest", "ada/hep:v2"]
    images.catalog.untag(ADA, "ada", "hep", "v2")
    refused(NotFound, lambda: images.catalog.resolve(ADA, "hep:v2"), match="hep:v2")
    refused(NotFound, lambda: images.catalog.untag(ADA, "ada", "hep", "v2"))
    with pytest.raises(NotFound) as caught:
        images.catalog.resolve(ADA, "nope")
    assert "ada/hep:latest" in caught.value.hint


@pytest.mark.both_databases
def test_names_at_the_same_moment(images: Repository) -> None:
    done = push(images, ADA, DISK, visibility="public")
    with ThreadPoolExecutor(6) as pool:
        for number in range(5):
            user = Viewer(f"user{number}")
            list(
                pool.map(
                    lambda n, u=user: images.catalog.tag(u, "", "hep", f"v{n}", done.digest), range(6)
                )
            )
            assert names(images, user)[1:] == [f"user{number}/hep:v{n}" for n in range(6)]
            images.catalog.remove(user, done.digest)


@pytest.mark.both_databases
def test_pushes_at_the_same_moment(images: Repository) -> None:
    with ThreadPoolExecutor(6) as pool:
        for number in range(3):
            disk = noise(1000, number)
            users = [ADA, BOB] * 3
            found = list(pool.map(lambda u, d=disk: push(images, u, d, name="hep"), users))
            assert len({done.digest for done in found}) == 1
            assert (
                images.catalog.resolve(ADA, "hep")
                == images.catalog.resolve(BOB, "hep")
                == found[0].digest
            )


def test_the_library(images: Repository) -> None:
    wish = {"namespace": "library", "name": "hep", "visibility": "public"}
    refused(Forbidden, lambda: push(images, ADA, DISK, **wish))
    done = push(images, ADMIN, DISK, **wish)
    assert done.owner == "library"
    assert (
        images.catalog.resolve(EVE, "hep") == images.catalog.resolve(EVE, "library/hep") == done.digest
    )
    own = push(images, EVE, noise(10), name="hep")
    assert images.catalog.resolve(EVE, "hep") == own.digest
    refused(
        Forbidden,
        lambda: images.catalog.tag(EVE, "library", "x", "latest", own.digest),
        lambda: images.catalog.untag(EVE, "library", "hep", "latest"),
        lambda: images.catalog.change(EVE, done.digest, ImageChange(deprecated="x")),
        lambda: images.catalog.tag(EVE, "ada", "x", "latest", own.digest),
    )
    other = Viewer("another operator", admin=True)
    assert images.catalog.change(other, done.digest, ImageChange(deprecated="old")).deprecated == "old"
    images.catalog.tag(EVE, "", "copy", "latest", done.digest)  # a hold of her own
    images.catalog.remove(other, done.digest)
    refused(NotFound, lambda: images.catalog.resolve(BOB, "library/hep"))
    assert images.catalog.resolve(EVE, "eve/copy") == done.digest


BAD_NAMES = [
    *("", ".", "..", "../x", "a/b", "-a", ".a", "A", "hep\n", "hep\0", "h p", "a:b", "sha256:"),
    *("hëp", "he\u200bp", "h\u202ep", "\uff48ep", "x" * 65, "x" * 300, "%2e%2e"),
]


def test_bad_names(images: Repository) -> None:
    done = push(images, ADA, DISK)
    for name in BAD_NAMES:
        calls = [
            lambda n=name: images.catalog.tag(ADA, "", n, "latest", done.digest),
            lambda n=name: images.catalog.untag(ADA, "", n, "latest"),
        ]
        if name != "A":
            calls.append(lambda n=name: images.catalog.tag(ADA, "", "hep", n, done.digest))
        if name not in {"a/b", "a:b"}:
            calls.append(lambda n=name: images.catalog.resolve(ADA, n))
        refused(InvalidRequest, *calls)
        if name:
            with pytest.raises((InvalidRequest, Forbidden)):
                images.catalog.tag(ADA, name, "hep", "latest", done.digest)
            with pytest.raises(ValueError, match="name"):
                Publication(manifest={}, name=name)
    assert images_of(images, ADA)[0].name == ""


def test_pushing_again_narrows_nothing(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep", visibility="public", keep_days=5)
    images.catalog.change(ADA, done.digest, ImageChange(deprecated="use v2"))
    again = push(images, ADA, DISK, name="hep", tag="v1", shares=[{"kind": "user", "name": "bob"}])
    assert again.digest == done.digest
    assert again.visibility is Visibility.PUBLIC
    assert again.deprecated == "use v2"
    assert again.shares == (Share(kind="user", name="bob"),)
    assert again.expires is None
    assert [t.tag for t in again.tags] == ["latest", "v1"]
    assert again.created == done.created


@pytest.mark.both_databases
def test_an_image_whose_time_is_over(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep", visibility="public", keep_days=1)
    assert done.expires is not None
    assert abs(done.expires - now() - timedelta(days=1)) < timedelta(minutes=1)
    expire(images, done.digest)
    for viewer, ref in ((ADA, "hep"), (ADA, done.digest), (EVE, "ada/hep")):
        with pytest.raises(NotFound, match="expired at"):
            images.catalog.resolve(viewer, ref)
    assert images_of(images, ADA) == []
    assert images.catalog.manifest(NODE, done.digest)  # jobs that have not ended still need it
    again = push(images, ADA, DISK, name="hep")
    assert images.catalog.resolve(EVE, "ada/hep") == again.digest
    private = push(images, ADA, noise(10), name="own")
    expire(images, private.digest)
    refused(NotFound, lambda: images.catalog.resolve(EVE, "ada/own"), match="there is no image")
    assert images.catalog.change(ADA, again.digest, ImageChange(keep_days=3)).expires is not None
    assert images.catalog.change(ADA, again.digest, ImageChange(keep_days=0)).expires is None
    expire(images, done.digest)
    assert images.garbage_collector.collect(dry_run=True).images == 2
    assert images.garbage_collector.collect().images == 2
    refused(NotFound, lambda: images.catalog.resolve(ADA, "hep"), match="there is no image")


def test_only_signed_images(images: Repository, tmp_path: Path) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    trust = tmp_path / "trust"
    trust.mkdir()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (trust / "grid.pub").write_bytes(public)
    strict = with_settings(images, image_trust_dir=trust)
    upload = strict.uploads.begin(ADA, 10_000).id
    parts = send(strict, ADA, upload, DISK)
    wish = Publication(manifest=manifest_of(parts), upload=upload, name="hep")
    unsigned = images.publisher.publish(ADA, wish.model_copy(update={"upload": upload}))
    assert unsigned.signers == ()
    good, bad = sign(unsigned.digest, key), sign(unsigned.digest, other)
    for signature, why in [("", "no signature"), (bad, "none of them"), (sign("x", key), "none")]:
        with pytest.raises(ImageRejected, match=why):
            strict.publisher.publish(ADA, wish.model_copy(update={"signature": signature}))
        with pytest.raises(ImageRejected):
            strict.catalog.change(ADA, unsigned.digest, ImageChange(signature=signature))
    with pytest.raises(InvalidRequest, match="base64"):
        images.publisher.publish(ADA, wish.model_copy(update={"signature": "ä"}))
    done = strict.publisher.publish(ADA, wish.model_copy(update={"signature": f"{bad} {good}"}))
    assert done.signers == ("grid",)
    assert strict.catalog.signature(NODE, done.digest).split() == [bad, good]


@pytest.mark.both_databases
def test_prefetching(repository: Repository) -> None:
    images = repository
    done = push(images, ADA, DISK, name="hep")
    for item in (
        node_of("a1", site="a"),
        node_of("a2", site="a", images=[done.digest]),
        node_of("b1", site="b"),
    ):
        repository.nodes.put(item)
    asked = images.prefetcher.request(ADA, done.digest, PrefetchRequest(site="a"))
    assert (asked.wanted, asked.cached) == (("a1",), ("a2",))
    asked = images.prefetcher.request(ADA, done.digest, PrefetchRequest(nodes=("b1", "a1")))
    assert (asked.wanted, asked.cached) == (("a1", "b1"), ("a2",))
    assert images.prefetcher.wishes(node_of("a1", site="a")).prefetch == (done.digest,)
    assert images.prefetcher.wishes(node_of("a2", site="a")).prefetch == ()
    assert images.prefetcher.wishes(node_of("a1", site="a", images=[done.digest])).prefetch == ()
    assert images.prefetcher.wishes(node_of("a1", site="a")).prefetch == ()  # the request was deleted
    for wish in (PrefetchRequest(nodes=("nope",)), PrefetchRequest(site="nowhere")):
        refused(NotFound, lambda wish=wish: images.prefetcher.request(ADA, done.digest, wish))
    images.catalog.remove(ADA, done.digest)
    assert images.prefetcher.wishes(node_of("b1", site="b")).prefetch == ()
