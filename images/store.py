"""The image store: manifests, the contents they name, and tags. A directory, no service."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from images.content import Layout
from images.files import write_atomically
from images.folder import ContentFolder
from images.manifest import ImageManifest, Part
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound
from vmjobs.hypervisor.base import BootImage
from vmjobs.ports import Progress

#: Image digests.
Digests = list[str]

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_KEY: Final = re.compile(r"[0-9a-f]{64}")
#: The directory of names without a namespace; no namespace begins like this.
_PLAIN: Final = "_"


@dataclass(frozen=True)
class ImageEntry:
    """A tagged image. name: with its namespace, if it has one. size: of all its parts, in bytes."""

    name: str
    tag: str
    digest: str
    size: int
    architecture: str


class ImageStore:
    """Images below ``root``. It is an :class:`vmjobs.ports.ImageSource` too.

    Safe for several processes at once: what is written appears whole, under its final name. Names
    are ``name:tag`` or ``namespace/name:tag``, at ``tags/NAMESPACE/NAME/TAG``; a name without a
    namespace is in the directory ``_``.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.folder = ContentFolder(self.root)
        self.folder.remove_leftovers()

    # ------------------------------------------------------------------ contents

    def put_content(self, stream: BinaryIO) -> Part:
        """Store what ``stream`` gives, zeros as holes.

        Raises:
            InvalidRequest: it gives nothing.
        """
        digest, size = self.folder.put(stream)
        return Part(digest=digest, size=size)

    def add_file(self, source: Path | BinaryIO, on_write: Callable[[int], None] | None = None) -> Part:
        """Store a regular file as it is, holes as holes. on_write: gets the bytes done so far.

        Raises:
            InvalidRequest: it is empty, or not a regular file. OSError: it cannot be read.
        """
        digest, size = self.folder.add_file(source, on_write)
        return Part(digest=digest, size=size)

    def content_path(self, digest: str) -> Path:
        """The content's file, its bytes checked.

        Raises:
            NotFound: it is not here. DigestMismatch: it is damaged.
        """
        return self.folder.verified(digest)

    def layout(self, digest: str) -> Layout:
        """The content's layout.

        Raises:
            NotFound: it is not here. DigestMismatch: it is damaged.
        """
        return self.folder.layout(digest)

    # ------------------------------------------------------------------ manifests

    def put_manifest(self, manifest: ImageManifest) -> str:
        """Store a manifest, whose contents must be here; returns the image's digest.

        Raises:
            NotFound: a content is missing.
        """
        for part in manifest.parts():
            if not self.folder.has(part.digest):
                raise NotFound(f"the image names the content {part.digest}, which is not here")
        self.write_manifest(manifest)
        return manifest.digest

    def write_manifest(self, manifest: ImageManifest) -> None:
        """Store a manifest whose contents are still to come."""
        self._write(self._manifest_path(manifest.digest), manifest.canonical())

    def has_manifest(self, digest: str) -> bool:
        """Whether the manifest is here (it is not looked at)."""
        return self._manifest_path(checked_digest(digest)).exists()

    def remove_manifest(self, digest: str) -> None:
        """Remove a manifest; its contents stay."""
        self._manifest_path(checked_digest(digest)).unlink(missing_ok=True)

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
        """Have ``name:tag`` mean ``digest`` from now on; ``name`` may be ``namespace/name``.

        Raises:
            InvalidRequest: name or tag is not one. NotFound: there is no such image.
        """
        path = self._tag_path(name, tag)
        if path is None:
            raise InvalidRequest(f"{name}:{tag} cannot name an image")
        self.manifest(digest)
        self._write(path, f"{digest}\n".encode())

    def untag(self, name: str, tag: str) -> None:
        """Have ``name:tag`` mean nothing; repeating it is no error. The image stays until gc."""
        path = self._tag_path(name, tag)
        if path is not None:
            path.unlink(missing_ok=True)

    def resolve(self, ref: str) -> str:
        """The digest that ``name``, ``name:tag``, ``namespace/name:tag`` or ``sha256:…`` stands for.

        Raises:
            NotFound: there is no such image.
        """
        if _DIGEST.fullmatch(ref):
            self.manifest(ref)
            return ref
        name, _, tag = ref.partition(":")
        path = self._tag_path(name, tag or "latest")
        try:
            if path is not None:
                return self._read_tag(path)
        except FileNotFoundError:
            pass
        there = ", ".join(sorted({f"{e.name}:{e.tag}" for e in self.list()})) or "none"
        raise NotFound(f"there is no image {ref!r}", hint=f"images that are here: {there}")

    def list(self) -> list[ImageEntry]:
        """All tags with their images, by name."""
        entries = []
        for path in sorted(self.root.glob("tags/*/*/*")):
            digest = self._read_tag(path)
            manifest = self.manifest(digest)
            namespace, name = path.parent.parent.name, path.parent.name
            full = name if namespace == _PLAIN else f"{namespace}/{name}"
            entries.append(ImageEntry(full, path.name, digest, manifest.size, manifest.architecture))
        return entries

    # ------------------------------------------------------------------ as an image source

    def prepare(self, digest: str, progress: Progress | None = None) -> BootImage:
        """The image's files, checked (:class:`vmjobs.ports.ImageSource`)."""
        manifest = self.manifest(digest)
        files: dict[str, Path] = {}
        before = 0
        for part in manifest.parts():
            step = shifted(progress, before, manifest.size)
            files[part.digest] = self.folder.verified(part.digest, part.size, step)
            before += part.size
            step(part.size)
        return boot_image(digest, manifest, files)

    @contextmanager
    def lease(self, digest: str, progress: Progress | None = None) -> Iterator[BootImage]:
        """As :meth:`prepare`; what is in a store of one's own stays there anyway."""
        yield self.prepare(digest, progress)

    def fetched(self, digest: str) -> int:
        """Nothing is fetched: what is in a store is here."""
        return 0

    def cached(self) -> Digests:
        """Digests of the images of which every part is here."""
        digests = (f"sha256:{path.stem}" for path in sorted(self.root.glob("manifests/*.json")))
        return [digest for digest in digests if self.complete(digest)]

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
        return digest if self.complete(digest) else None

    def complete(self, digest: str) -> bool:
        """Whether the image is here with all of its parts (their bytes are not looked at)."""
        try:
            return all(self.folder.has(part.digest) for part in self.manifest(digest).parts())
        except (NotFound, DigestMismatch):
            return False

    def _manifest_path(self, digest: str) -> Path:
        return self.root / "manifests" / f"{digest.removeprefix('sha256:')}.json"

    def _tag_path(self, name: str, tag: str) -> Path | None:
        """Where a tag is or would be; None if it cannot be one."""
        namespace, slash, plain = name.rpartition("/")
        if slash and not _NAME.fullmatch(namespace):
            return None
        if not _NAME.fullmatch(plain) or not _TAG.fullmatch(tag):
            return None
        return self.root / "tags" / (namespace or _PLAIN) / plain / tag

    def _read_tag(self, path: Path) -> str:
        digest = path.read_text("utf-8", "replace").strip()
        if not _DIGEST.fullmatch(digest):
            raise DigestMismatch(f"{path} is damaged: it has no digest", hint="tag the image again")
        return digest

    def _write(self, path: Path, data: bytes) -> None:
        write_atomically(path, data, self.root / "tmp")


def boot_image(digest: str, manifest: ImageManifest, files: Mapping[str, Path]) -> BootImage:
    """An image with its contents' files, by their digests."""
    return BootImage(
        digest=digest,
        root=files[manifest.root.digest],
        boot=manifest.boot,
        partition=manifest.partition,
        kernel=files[manifest.kernel.digest] if manifest.kernel else None,
        initrd=files[manifest.initrd.digest] if manifest.initrd else None,
        cmdline=manifest.cmdline,
        cloud_init=manifest.cloud_init,
        kinds=manifest.hypervisors,
        architecture=manifest.architecture,
    )


def shifted(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    """The progress of one part as that of the whole, of which ``before`` bytes were done before."""
    if progress is None:
        return lambda _done: None
    return lambda done: progress(before + done, total)


def checked_digest(value: str) -> str:
    """``value``, if it is a digest; nothing else may become part of a path.

    Raises:
        NotFound: it is none, so there is no such thing.
    """
    if not _DIGEST.fullmatch(value):
        raise NotFound(f"{value!r} is not a digest")
    return value
