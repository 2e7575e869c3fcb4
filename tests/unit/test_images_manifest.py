"""Manifests: canonical bytes, digests, and what is refused."""

from __future__ import annotations

import hashlib
import json

import pytest
from pydantic import ValidationError

from images.manifest import Blob, ImageManifest, digest_of
from vmjobs.errors import DigestMismatch

ROOT = Blob(digest="sha256:" + "a" * 64, size=7, format="raw")


def manifest(**more: object) -> ImageManifest:
    return ImageManifest(name="tiny", root=ROOT, **more)  # type: ignore[arg-type]


def test_canonical_bytes_are_sorted_json_without_spaces() -> None:
    made = manifest(packages={"zlib": "1", "büro": "2"}, cmdline=("init=/sbin/vmjobs-init",))
    data = made.canonical()
    value = json.loads(data)
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert value == {
        "schema": 1,
        "name": "tiny",
        "architecture": "x86_64",
        "root": {"digest": ROOT.digest, "size": 7, "format": "raw"},
        "kernel": None,
        "initrd": None,
        "cmdline": ["init=/sbin/vmjobs-init"],
        "guest": {"contract": 1},
        "recipe": None,
        "packages": {"zlib": "1", "büro": "2"},
    }
    assert made.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_the_order_of_packages_makes_no_difference() -> None:
    assert (
        manifest(packages={"a": "1", "b": "2"}).digest == manifest(packages={"b": "2", "a": "1"}).digest
    )


def test_what_was_written_is_read_back() -> None:
    made = manifest(kernel=Blob(digest=ROOT.digest, size=1), recipe=ROOT.digest)
    assert ImageManifest.parse(made.canonical(), made.digest) == made
    assert made.blobs() == (made.root, made.kernel)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{}", "is not an image manifest"),
        (b"\xff", "is not an image manifest"),
        (manifest().canonical().replace(b'"raw"', b'"qcow2"'), "format"),
        (manifest().canonical().replace(b'"schema":1', b'"schema":2'), "schema"),
        (manifest().canonical().replace(b'"size":7', b'"size":-7'), "size"),
        (manifest().canonical()[:-1] + b',"more":1}', "more"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(DigestMismatch, match=words):
        ImageManifest.parse(data, digest_of(data))


def test_a_manifest_with_other_bytes_than_its_digest_is_refused() -> None:
    with pytest.raises(DigestMismatch, match="damaged"):
        ImageManifest.parse(manifest().canonical(), ROOT.digest)


@pytest.mark.parametrize("name", ["", "Upper", "../up", "a/b", "-x", "a" * 65])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        ImageManifest(name=name, root=ROOT)
