"""Signatures of images: detached Ed25519 signatures of an image's digest.

A signature is base64; several signatures are separated by spaces. A trusted key is a file
``NAME.pub``: PEM, an OpenSSH public key, or the key's 32 bytes in base64.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from vmjobs.errors import ConfigError, ImageRejected, InvalidRequest, reason_of

_TAG: Final = b"vmjobs-image-1\0"
#: Largest key file, in bytes.
MAX_KEY_BYTES: Final = 16 * 1024
#: Most signatures from one holder of an image, and most that are verified in all.
MAX_SIGNATURES_PER_HOLDER: Final = 4
MAX_SIGNATURES: Final = 64
_SIGNATURE: Final = re.compile(r"[A-Za-z0-9+/]{86}==")

TrustedKeys = Mapping[str, Ed25519PublicKey]


def sign(digest: str, key: Ed25519PrivateKey) -> str:
    """The signature of the image that ``digest`` names."""
    return base64.b64encode(key.sign(_message(digest))).decode("ascii")


def check_signature_form(signature: str) -> None:
    """Check the form of at most four signatures. Raises InvalidRequest."""
    words = signature.split()
    if len(words) > MAX_SIGNATURES_PER_HOLDER or not all(_SIGNATURE.fullmatch(word) for word in words):
        raise InvalidRequest(
            f"invalid signatures (expected at most {MAX_SIGNATURES_PER_HOLDER}, separated by spaces, "
            "each 88 characters of base64)",
            hint="`vmjobs image push --sign KEY` makes one",
        )


def find_signers(digest: str, signature: str, keys: TrustedKeys) -> tuple[str, ...]:
    """Sorted names of the trusted keys that signed the image; may be empty."""
    found: set[str] = set()
    for word in signature.split()[:MAX_SIGNATURES]:
        try:
            data = base64.b64decode(word, validate=True)
        except ValueError:
            continue
        found.update(name for name, key in keys.items() if _is_valid(key, data, digest))
    return tuple(sorted(found))


def require_signed(digest: str, signature: str, keys: TrustedKeys) -> tuple[str, ...]:
    """Names of the trusted keys that signed the image. Raises ImageRejected if none."""
    names = find_signers(digest, signature, keys)
    if not names:
        what = "has no signature" if not signature.strip() else "is signed, but by none of them"
        known = ", ".join(sorted(keys)) or "none"
        raise ImageRejected(
            f"only images signed by a trusted key are accepted here, and {digest} {what}",
            hint=f"trusted keys: {known}",
        )
    return names


def load_trusted_keys(folder: Path) -> dict[str, Ed25519PublicKey]:
    """The public keys in a folder, by file name without ``.pub``.

    Raises ConfigError if a file is not a key or cannot be read: a key must not be ignored silently.
    """
    try:
        files = sorted(folder.glob("*.pub"))
        if not folder.is_dir():
            raise ConfigError(f"image_trust_dir: there is no folder {folder}")
        return {file.stem: parse_public_key(_read(file)) for file in files}
    except OSError as error:
        why = f"{error.filename or folder}: {reason_of(error)}"
        raise ConfigError(f"image_trust_dir: {why}") from error
    except InvalidRequest as error:
        raise ConfigError(f"image_trust_dir: {error.message}") from error


def parse_public_key(data: bytes) -> Ed25519PublicKey:
    """Parse the bytes of a public key file. Raises InvalidRequest: not a public key."""
    text = data.strip()
    try:
        if text.startswith(b"-----BEGIN"):
            key = load_pem_public_key(text)
        elif text.startswith(b"ssh-"):
            key = load_ssh_public_key(text)
        else:
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(f"not a public key: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidRequest("not an Ed25519 public key")
    return key


def read_private_key(file: Path) -> Ed25519PrivateKey:
    """Read a private key, PEM or OpenSSH format, without pass phrase.

    Raises InvalidRequest: it is not a private key, or cannot be read.
    """
    try:
        data = _read(file)
        openssh = b"OPENSSH PRIVATE KEY" in data
        key = load_ssh_private_key(data, None) if openssh else load_pem_private_key(data, None)
    except OSError as error:
        raise InvalidRequest(f"cannot read the key {file}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(f"{file} is not a private key without pass phrase: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidRequest(f"{file} is not an Ed25519 key", hint="ssh-keygen -t ed25519 makes one")
    return key


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        data = stream.read(MAX_KEY_BYTES + 1)
    if len(data) > MAX_KEY_BYTES:
        raise InvalidRequest(f"{file} is too large to be a key")
    return data


def _message(digest: str) -> bytes:
    return _TAG + digest.encode("ascii")


def _is_valid(key: Ed25519PublicKey, signature: bytes, digest: str) -> bool:
    try:
        key.verify(signature, _message(digest))
    except InvalidSignature:
        return False
    return True
