"""Manifests: canonical bytes, digests, signatures, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from pydantic import ValidationError

from images.manifest import GuestSupport, ImageManifest, Part, sha256_digest
from images.signature import (
    MAX_SIGNATURES_PER_HOLDER,
    check_signature_form,
    find_signers,
    load_trusted_keys,
    parse_public_key,
    read_private_key,
    require_signed,
    sign,
)
from vmjobs.errors import ConfigError, DigestMismatch, ImageRejected, InvalidRequest
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


def test_what_was_written_is_read_back() -> None:
    made = manifest(kernel=Part(digest=ROOT.digest, size=1), recipe=IMAGE)
    assert ImageManifest.parse(made.canonical(), made.digest) == made
    assert made.parts() == (made.root, made.kernel)
    assert made.size == 8


def test_how_it_boots_says_which_hypervisors_can() -> None:
    assert manifest().hypervisors == (HypervisorKind.UML,)
    every = manifest(kernel=ROOT, guest=GuestSupport(), xen=True)
    assert every.hypervisors == tuple(HypervisorKind)
    assert HypervisorKind.XEN not in manifest(kernel=ROOT, guest=GuestSupport()).hypervisors
    own = (HypervisorKind.KVM, HypervisorKind.QEMU)
    assert manifest(boot=BootMethod.BIOS).hypervisors == own
    assert HypervisorKind.XEN in manifest(boot=BootMethod.BIOS, xen=True).hypervisors
    foreign = manifest(kernel=ROOT, guest=GuestSupport(), architecture="s390x")
    assert foreign.hypervisors == (HypervisorKind.QEMU,)
    assert manifest(kernel=ROOT).hypervisors == own, "what is in there wants its own kernel"
    assert manifest(cloud_init=True).hypervisors == (HypervisorKind.UML,)


@pytest.mark.parametrize(
    "more",
    [
        {"boot": "bios", "kernel": ROOT},
        {"boot": "uefi", "cmdline": ("quiet",)},
        {"initrd": ROOT},
        {"xen": True},
        {"boot": "uefi", "xen": True},
        {"boot": "uefi", "architecture": "aarch64"},
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


DIGEST = "sha256:" + "ab" * 32
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.generate()
SPKI, RAW = PublicFormat.SubjectPublicKeyInfo, PublicFormat.Raw


def forms(key: Ed25519PrivateKey) -> dict[str, bytes]:
    """Return a public key in every form that is accepted."""
    public = key.public_key()
    return {
        "pem": public.public_bytes(Encoding.PEM, SPKI),
        "openssh": public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b" ada@grid\n",
        "raw": base64.b64encode(public.public_bytes(Encoding.Raw, RAW)) + b"\n",
    }


@pytest.mark.parametrize("form", ["pem", "openssh", "raw"])
def test_a_trusted_signature_names_its_key(form: str, tmp_path: Path) -> None:
    (tmp_path / "grid.pub").write_bytes(forms(KEY)[form])
    (tmp_path / "other.pub").write_bytes(forms(Ed25519PrivateKey.generate())[form])
    (tmp_path / "notes.txt").write_text("not a key, and not called one")
    keys = load_trusted_keys(tmp_path)
    assert sorted(keys) == ["grid", "other"]
    good, bad = sign(DIGEST, KEY), sign(DIGEST, OTHER)
    assert find_signers(DIGEST, good, keys) == ("grid",)
    assert require_signed(DIGEST, f"{bad}\n{good} ", keys) == ("grid",)
    for signature in ("", " ", bad, good[:-4], good.lower(), sign("sha256:" + "0" * 64, KEY)):
        assert find_signers(DIGEST, signature, keys) == ()
        with pytest.raises(ImageRejected):
            require_signed(DIGEST, signature, keys)
    with pytest.raises(ImageRejected, match="by none of them"):
        require_signed(DIGEST, good, {})


def test_a_signature_is_over_the_tagged_digest() -> None:
    """A fixed format: other tools can sign and verify by the documentation."""
    signature = base64.b64decode(sign(DIGEST, KEY))
    KEY.public_key().verify(signature, b"vmjobs-image-1\0" + DIGEST.encode())
    assert sign(DIGEST, KEY) == sign(DIGEST, KEY)


def test_the_form_of_signatures() -> None:
    good = sign(DIGEST, KEY)
    for fine in ("", good, " ".join([good] * MAX_SIGNATURES_PER_HOLDER)):
        check_signature_form(fine)
    for bad in (
        "x",
        good[:-1],
        "ä",
        good + good,
        " ".join([good] * (MAX_SIGNATURES_PER_HOLDER + 1)),
        "\0" * 88,
    ):
        with pytest.raises(InvalidRequest):
            check_signature_form(bad)


def test_keys_that_are_none(tmp_path: Path) -> None:
    elliptic = generate_private_key(SECP256R1()).public_key().public_bytes(Encoding.PEM, SPKI)
    for data in (
        b"",
        b"hello",
        b"-----BEGIN PUBLIC KEY-----\n",
        elliptic,
        b"ssh-ed25519 AAAA",
        b"\xff",
    ):
        with pytest.raises(InvalidRequest):
            parse_public_key(data)
        (tmp_path / "bad.pub").write_bytes(data)
        with pytest.raises(ConfigError, match="image_trust_dir"):
            load_trusted_keys(tmp_path)
    (tmp_path / "bad.pub").write_bytes(forms(KEY)["raw"] * 1000)
    with pytest.raises(ConfigError, match="too large"):
        load_trusted_keys(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        load_trusted_keys(tmp_path / "nowhere")


def test_private_keys(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for encoding, form in ((Encoding.PEM, PrivateFormat.PKCS8), (Encoding.PEM, PrivateFormat.OpenSSH)):
        file.write_bytes(KEY.private_bytes(encoding, form, NoEncryption()))
        assert sign(DIGEST, read_private_key(file)) == sign(DIGEST, KEY)
    locked = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    for data in (b"", b"hello", locked, forms(KEY)["pem"]):
        file.write_bytes(data)
        with pytest.raises(InvalidRequest):
            read_private_key(file)
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_private_key(tmp_path / "nowhere")
