"""Signatures of images: which keys are trusted, and the forms of a key."""

from __future__ import annotations

import base64
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
from vmjobs.errors import ConfigError, ImageRejected, InvalidRequest

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
