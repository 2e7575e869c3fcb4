"""Manifests: canonical bytes, digests, and what is refused."""

from __future__ import annotations

import hashlib
import json

import pytest
from pydantic import ValidationError

from images.manifest import GuestSupport, ImageManifest, Part, sha256_digest
from vmjobs.errors import DigestMismatch
from vmjobs.model import BootMethod, HypervisorKind

ROOT = Part(digest="tree:" + "a" * 64, size=7)
IMAGE = "sha256:" + "b" * 64


def manifest(**more: object) -> ImageManifest:
    return ImageManifest(root=ROOT, **more)  # type: ignore[arg-type]


def test_canonical_bytes_are_sorted_json_without_spaces() -> None:
    made = manifest(
        packages={"zlib": "1", "büro": "2"}, cmdline=("init=/sbin/vmjobs-init",), guest=GuestSupport()
    )
    data = made.canonical()
    value = json.loads(data)
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert value == {
        "schema": 2,
        "architecture": "x86_64",
        "boot": "kernel",
        "root": {"digest": ROOT.digest, "size": 7},
        "partition": 0,
        "kernel": None,
        "initrd": None,
        "cmdline": ["init=/sbin/vmjobs-init"],
        "guest": {"contract": 1},
        "cloud_init": False,
        "program": None,
        "parent": None,
        "recipe": None,
        "packages": {"zlib": "1", "büro": "2"},
    }
    assert made.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_the_order_of_packages_makes_no_difference() -> None:
    assert (
        manifest(packages={"a": "1", "b": "2"}).digest == manifest(packages={"b": "2", "a": "1"}).digest
    )


def test_what_was_written_is_read_back() -> None:
    made = manifest(kernel=Part(digest=ROOT.digest, size=1), recipe=IMAGE)
    assert ImageManifest.parse(made.canonical(), made.digest) == made
    assert made.parts() == (made.root, made.kernel)
    assert made.size == 8


def test_how_it_boots_says_which_hypervisors_can() -> None:
    assert manifest().hypervisors == (HypervisorKind.UML,)
    assert manifest(kernel=ROOT, guest=GuestSupport()).hypervisors == tuple(HypervisorKind)
    own = (HypervisorKind.KVM, HypervisorKind.QEMU)
    assert manifest(boot=BootMethod.BIOS).hypervisors == own
    assert manifest(kernel=ROOT).hypervisors == own, "what is in there wants its own kernel"
    assert manifest(cloud_init=True).hypervisors == (HypervisorKind.UML,)


@pytest.mark.parametrize(
    "more",
    [
        {"boot": "bios", "kernel": ROOT},
        {"boot": "uefi", "cmdline": ("quiet",)},
        {"initrd": ROOT},
        {"cmdline": ("two words",)},
        {"partition": -1},
    ],
)
def test_what_cannot_boot_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        manifest(**more)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{}", "is not an image manifest"),
        (b"\xff", "is not an image manifest"),
        (manifest().canonical().replace(b'"tree:', b'"sha256:'), "digest"),
        (manifest().canonical().replace(b'"schema":2', b'"schema":1'), "schema"),
        (manifest().canonical().replace(b'"size":7', b'"size":-7'), "size"),
        (manifest().canonical().replace(b'"size":7', b'"size":0'), "size"),
        (manifest().canonical()[:-1] + b',"name":"tiny"}', "name"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(DigestMismatch, match=words):
        ImageManifest.parse(data, sha256_digest(data))


def test_a_manifest_with_other_bytes_than_its_digest_is_refused() -> None:
    with pytest.raises(DigestMismatch, match="damaged"):
        ImageManifest.parse(manifest().canonical(), IMAGE)
