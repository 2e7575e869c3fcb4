"""The image store: manifests, the blobs they name, and tags. A directory, no service."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from images.blobs import BlobFolder, write_atomically
from images.manifest import ImageManifest
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound
from vmjobs.hypervisor.base import BootImage
from vmjobs.ports import Progress

#: Image digests.
Digests = list[str]

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_KEY: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ImageEntry:
    """A tagged image. size: of all its parts, in bytes."""

    name: str
    tag: str
    digest: str
    size: int
    architecture: str


class ImageStore:
    """Images below ``root``. It is an :class:`vmjobs.ports.ImageSource` too.

    Safe for several processes at once: what is written appears whole, under its final name.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.folder = BlobFolder(self.root)

    # ------------------------------------------------------------------ blobs

    def put_blob(self, stream: BinaryIO) -> tuple[str, int]:
        """Store what ``stream`` gives, zeros as holes; returns digest and size in bytes."""
        return self.folder.put(stream)

    def blob_path(self, digest: str) -> Path:
        """The blob's file, its bytes checked.

        Raises:
            NotFound: it is not here. DigestMismatch: it is damaged.
        """
        return self.folder.verified(checked_digest(digest))

    # ------------------------------------------------------------------ manifests

    def put_manifest(self, manifest: ImageManifest) -> str:
        """Store a manifest, whose blobs must be here; returns the image's digest.

        Raises:
            NotFound: a blob is missing.
        """
        for blob in manifest.blobs():
            if not self.folder.has(blob.digest):
                raise NotFound(f"image {manifest.name} names the blob {blob.digest}, which is not here")
        data = manifest.canonical()
        self._write(self._manifest_path(manifest.digest), data)
        return manifest.digest

    def manifest_bytes(self, digest: str) -> bytes:
        """The manifest as it is stored.

        Raises:
            NotFound: there is no such image. DigestMismatch: it is damaged.
        """
        try:
            data = self._manifest_path(checked_digest(digest)).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no image {digest}") from None
        ImageManifest.parse(data, digest)
        return data

    def manifest(self, digest: str) -> ImageManifest:
        """The manifest of an image.

        Raises:
            NotFound: there is no such image. DigestMismatch: it is damaged.
        """
        try:
            data = self._manifest_path(checked_digest(digest)).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no image {digest}") from None
        return ImageManifest.parse(data, digest)

    # ------------------------------------------------------------------ tags

    def tag(self, name: str, tag: str, digest: str) -> None:
        """Have ``name:tag`` mean ``digest`` from now on.

        Raises:
            InvalidRequest: name or tag is not one. NotFound: there is no such image.
        """
        if not _NAME.fullmatch(name) or not _TAG.fullmatch(tag):
            raise InvalidRequest(f"{name}:{tag} cannot name an image")
        self.manifest(digest)
        self._write(self.root / "tags" / name / tag, f"{digest}\n".encode())

    def resolve(self, ref: str) -> str:
        """The digest that ``name``, ``name:tag`` or ``sha256:…`` stands for.

        Raises:
            NotFound: there is no such image.
        """
        if _DIGEST.fullmatch(ref):
            self.manifest(ref)
            return ref
        name, _, tag = ref.partition(":")
        tag = tag or "latest"
        if _NAME.fullmatch(name) and _TAG.fullmatch(tag):
            try:
                return self._read_tag(self.root / "tags" / name / tag)
            except FileNotFoundError:
                pass
        there = ", ".join(sorted({f"{e.name}:{e.tag}" for e in self.list()})) or "none"
        raise NotFound(f"there is no image {ref!r}", hint=f"images that are here: {there}")

    def list(self) -> list[ImageEntry]:
        """All tags with their images, by name."""
        entries = []
        for path in sorted(self.root.glob("tags/*/*")):
            digest = self._read_tag(path)
            manifest = self.manifest(digest)
            size = sum(blob.size for blob in manifest.blobs())
            entry = ImageEntry(path.parent.name, path.name, digest, size, manifest.architecture)
            entries.append(entry)
        return entries

    # ------------------------------------------------------------------ as an image source

    def prepare(self, digest: str, progress: Progress | None = None) -> BootImage:
        """The image's files, checked (:class:`vmjobs.ports.ImageSource`)."""
        manifest = self.manifest(digest)
        total = sum(blob.size for blob in manifest.blobs())
        files: dict[str, Path] = {}
        done = 0
        for blob in manifest.blobs():
            files[blob.digest] = self.folder.verified(blob.digest, blob.size)
            done += blob.size
            if progress is not None:
                progress(done, total)
        return BootImage(
            digest=digest,
            root=files[manifest.root.digest],
            kernel=files[manifest.kernel.digest] if manifest.kernel else None,
            initrd=files[manifest.initrd.digest] if manifest.initrd else None,
            cmdline=manifest.cmdline,
        )

    def cached(self) -> Digests:
        """Digests of the images of which every part is here."""
        digests = (f"sha256:{path.stem}" for path in sorted(self.root.glob("manifests/*.json")))
        return [digest for digest in digests if self._complete(digest)]

    # ------------------------------------------------------------------ builds

    def record_build(self, key: str, digest: str) -> None:
        """Remember that building from inputs with this key (64 hex digits) gave this image."""
        if not _KEY.fullmatch(key):
            raise InvalidRequest(f"{key!r} is not a build's key")
        self._write(self.root / "builds" / key, f"{digest}\n".encode())

    def built(self, key: str) -> str | None:
        """The image built from inputs with this key, if it is here, complete."""
        if not _KEY.fullmatch(key):
            return None
        try:
            digest = self._read_tag(self.root / "builds" / key)
        except (FileNotFoundError, DigestMismatch):
            return None
        return digest if self._complete(digest) else None

    def _complete(self, digest: str) -> bool:
        try:
            return all(self.folder.has(blob.digest) for blob in self.manifest(digest).blobs())
        except (NotFound, DigestMismatch):
            return False

    def _manifest_path(self, digest: str) -> Path:
        return self.root / "manifests" / f"{digest.removeprefix('sha256:')}.json"

    def _read_tag(self, path: Path) -> str:
        digest = path.read_text("utf-8", "replace").strip()
        if not _DIGEST.fullmatch(digest):
            raise DigestMismatch(f"{path} is damaged: it has no digest", hint="tag the image again")
        return digest

    def _write(self, path: Path, data: bytes) -> None:
        write_atomically(path, data, self.root / "tmp")


def checked_digest(value: str) -> str:
    """``value``, if it is a digest; nothing else may become part of a path.

    Raises:
        NotFound: it is none, so there is no such thing.
    """
    if not _DIGEST.fullmatch(value):
        raise NotFound(f"{value!r} is not a digest")
    return value
