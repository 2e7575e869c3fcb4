"""The image store, a directory: manifests, the contents that they name, and tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from images.manifest import ImageManifest, Part
from images.store.content_folder import ContentFolder
from images.store.files import exclusive_lock, remove_leftovers, write_atomically
from vmjobs.agent.image_source import LazyStart
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound
from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import BootImage

#: Image digests.
DigestList = list[str]

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
#: The directory of names without a namespace; no namespace starts with this character.
_NO_NAMESPACE: Final = "_"


@dataclass(frozen=True)
class ImageEntry:
    """A tagged image. name: with namespace, if any. size: bytes of all its parts."""

    name: str
    tag: str
    digest: str
    size: int
    architecture: str


class ImageStore:
    """Images below ``root``; also an :class:`vmjobs.agent.image_source.ImageSource`.

    Safe for several processes: all writes are atomic. Names are ``name:tag`` or
    ``namespace/name:tag``, at ``tags/NAMESPACE/NAME/TAG``; names without a namespace are in the
    directory ``_``.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.folder = ContentFolder(self.root)
        remove_leftovers(self.folder.temporary)

    def hold_lock(self) -> AbstractContextManager[None]:
        """Hold the lock for removals, and for manifests that are added before their contents."""
        return exclusive_lock(self.root / "locks" / "room")

    # ------------------------------------------------------------------ manifests

    def put_manifest(self, manifest: ImageManifest) -> str:
        """Store a manifest of contents that are here; returns the image's digest.

        Raises:
            NotFound: a content is missing.
        """
        for part in manifest.parts():
            if not self.folder.has(part.digest):
                raise NotFound(f"the image needs the content {part.digest}, which is not in the store")
        self.write_manifest(manifest)
        return manifest.digest

    def write_manifest(self, manifest: ImageManifest) -> None:
        """Store a manifest, also before its contents."""
        self._write(self._manifest_path(manifest.digest), manifest.canonical())

    def has_manifest(self, digest: str) -> bool:
        """Whether the manifest is here (it is not verified)."""
        return self._manifest_path(check_digest(digest)).exists()

    def remove_manifest(self, digest: str) -> None:
        """Remove a manifest; its contents stay."""
        self._manifest_path(check_digest(digest)).unlink(missing_ok=True)

    def manifest(self, digest: str) -> ImageManifest:
        """The manifest of an image.

        Raises:
            NotFound: there is no such image. DigestMismatch: it is damaged.
        """
        try:
            data = self._manifest_path(check_digest(digest)).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"there is no image {digest}") from None
        return ImageManifest.parse(data, digest)

    def digests(self) -> DigestList:
        """Digests of the manifests that are here (they are not verified)."""
        return [f"sha256:{path.stem}" for path in self.root.glob("manifests/*.json")]

    def contents_of(self, digests: Iterable[str]) -> set[str]:
        """The contents that these images name; a missing or damaged manifest names none."""
        found: set[str] = set()
        for digest in digests:
            with suppress(NotFound, DigestMismatch):
                found.update(part.digest for part in self.manifest(digest).parts())
        return found

    # ------------------------------------------------------------------ tags

    def tag(self, name: str, tag: str, digest: str) -> None:
        """Make ``name:tag`` refer to ``digest``; ``name`` may be ``namespace/name``.

        Raises:
            InvalidRequest: name or tag is invalid. NotFound: there is no such image.
        """
        path = self._tag_path(name, tag)
        if path is None:
            raise InvalidRequest(f"{name}:{tag} is not a valid image name")
        self.manifest(digest)
        self._write(path, f"{digest}\n".encode())

    def untag(self, name: str, tag: str) -> None:
        """Remove ``name:tag``, if it exists. The image stays until gc."""
        path = self._tag_path(name, tag)
        if path is not None:
            path.unlink(missing_ok=True)

    def resolve(self, ref: str) -> str:
        """The digest of ``name``, ``name:tag``, ``namespace/name:tag`` or ``sha256:…``.

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
        """All tags with their images, sorted by name."""
        entries = []
        for path in sorted(self.root.glob("tags/*/*/*")):
            digest = self._read_tag(path)
            manifest = self.manifest(digest)
            namespace, name = path.parent.parent.name, path.parent.name
            full = name if namespace == _NO_NAMESPACE else f"{namespace}/{name}"
            entries.append(ImageEntry(full, path.name, digest, manifest.size, manifest.architecture))
        return entries

    # ------------------------------------------------------------------ as an image source

    def prepare(self, digest: str, progress: ProgressCallback | None = None) -> BootImage:
        """The image's files, verified (:class:`vmjobs.agent.image_source.ImageSource`)."""
        manifest = self.manifest(digest)
        files: dict[str, Path] = {}
        for part, on_progress in track_parts(manifest, progress):
            files[part.digest] = self.folder.verify(part.digest, part.size, on_progress)
        return make_boot_image(digest, manifest, files)

    @contextmanager
    def lease(
        self, digest: str, progress: ProgressCallback | None = None, lazy: LazyStart | None = None
    ) -> Iterator[BootImage]:
        """As :meth:`prepare`: a store has whole images, and evicts none, so there is no lock."""
        yield self.prepare(digest, progress)

    def fetched(self, digest: str) -> int:
        """Always 0: a store fetches nothing."""
        return 0

    def cached(self) -> DigestList:
        """Digests of the complete images."""
        return [digest for digest in sorted(self.digests()) if self.complete(digest)]

    # ------------------------------------------------------------------ builds

    def record_build(self, key: str, digest: str) -> None:
        """Record the image built from inputs with this key (64 hexadecimal digits)."""
        self._write(self.root / "builds" / key, f"{digest}\n".encode())

    def built(self, key: str) -> str | None:
        """Digest of the image built from inputs with this key, if it is complete."""
        try:
            digest = self._read_tag(self.root / "builds" / key)
        except (FileNotFoundError, DigestMismatch):
            return None
        return digest if self.complete(digest) else None

    def complete(self, digest: str) -> bool:
        """Whether all parts of the image are here (their bytes are not verified)."""
        try:
            return all(self.folder.has(part.digest) for part in self.manifest(digest).parts())
        except (NotFound, DigestMismatch):
            return False

    def _manifest_path(self, digest: str) -> Path:
        return self.root / "manifests" / f"{digest.removeprefix('sha256:')}.json"

    def _tag_path(self, name: str, tag: str) -> Path | None:
        """Path of a tag, which need not exist; None if name or tag is invalid."""
        namespace, slash, plain = name.rpartition("/")
        if slash and not _NAME.fullmatch(namespace):
            return None
        if not _NAME.fullmatch(plain) or not _TAG.fullmatch(tag):
            return None
        return self.root / "tags" / (namespace or _NO_NAMESPACE) / plain / tag

    def _read_tag(self, path: Path) -> str:
        digest = path.read_text("utf-8", "replace").strip()
        if not _DIGEST.fullmatch(digest):
            raise DigestMismatch(f"{path} is damaged: it has no digest", hint="tag the image again")
        return digest

    def _write(self, path: Path, data: bytes) -> None:
        write_atomically(path, data, self.root / "tmp")


def make_boot_image(digest: str, manifest: ImageManifest, files: Mapping[str, Path]) -> BootImage:
    """A boot image from a manifest. files: paths of its contents, by digest."""
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


def track_parts(
    manifest: ImageManifest, progress: ProgressCallback | None
) -> Iterator[tuple[Part, Callable[[int], None]]]:
    """The parts of an image, each with a callback for its bytes that are done.

    The callback reports progress of the whole image. A part is complete when the next one is asked for.
    """
    before = 0
    for part in manifest.parts():

        def report(done: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, manifest.size)

        yield part, report
        report(part.size)
        before += part.size


def check_digest(value: str) -> str:
    """Return ``value`` if it is a digest: nothing else may become part of a path.

    Raises:
        NotFound: it is not a digest.
    """
    if not _DIGEST.fullmatch(value):
        raise NotFound(f"{value!r} is not a digest")
    return value
