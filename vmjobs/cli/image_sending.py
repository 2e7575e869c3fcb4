"""Prepares a file or an image of the local store, uploads and publishes it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from images.admission import admit
from images.bootinfo import boot_of
from images.content import Layout
from images.formats import Description, Format
from images.manifest import GuestSupport, ImageManifest, Part
from images.push import mark_of, send_content
from images.push_notes import KEEP_SECONDS, Notes, UploadNote
from images.signature import private_key, sign
from images.store import ImageStore
from vmjobs import __version__
from vmjobs.cli.image_support import Bar, Name, bar, cache_folder, say
from vmjobs.client.images import Images
from vmjobs.client.uploads import UploadClient
from vmjobs.errors import InvalidRequest, NotFound, PayloadTooLarge, VMJobsError
from vmjobs.model import BootMethod, faults_of
from vmjobs.wire import ImageDetail, Origin, Publication, Share, Visibility

NOTES = "push"


@dataclass(frozen=True)
class Wishes:
    """Command-line options about a file to push."""

    pinned: str | None = None
    boot: BootMethod | None = None
    kernel: Path | None = None
    initrd: Path | None = None
    cmdline: tuple[str, ...] = ()
    partition: int | None = None
    cloud_init: bool = False
    guest: bool = False
    architecture: str = "x86_64"


@dataclass(frozen=True)
class Terms:
    """Visibility, retention and signature of an image. key: a private key."""

    visibility: Visibility = Visibility.PRIVATE
    shares: tuple[Share, ...] = ()
    keep_days: int = 0
    key: Path | None = None


@dataclass(frozen=True)
class _Content:
    """A part of an image: its role, its file, and its layout if known."""

    role: str
    path: Path
    layout: Layout | None = None


@dataclass
class Brought:
    """An image to push. source: identifies it on this host. finish: makes the manifest."""

    name: str
    source: str
    origin: Origin
    contents: list[_Content]
    finish: Callable[[dict[str, Part]], ImageManifest]
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(content.path.stat().st_size for content in self.contents)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stack.__exit__(kind, error, trace)


@dataclass(frozen=True)
class Sent:
    """A pushed image. size: bytes of content; sent: bytes transferred."""

    manifest: ImageManifest
    upload: UploadClient
    note: UploadNote
    origin: Origin
    size: int
    sent: int


# --------------------------------------------------------------------------- sources


def from_store(store: ImageStore, ref: str) -> Brought:
    """Prepare an image of the local store.

    Raises:
        NotFound: the image does not exist. DigestMismatch: it is damaged.
    """
    digest = store.resolve(ref)
    manifest = store.manifest(digest)
    contents = [
        _Content(part.digest, store.content_path(part.digest), store.layout(part.digest))
        for part in manifest.parts()
    ]
    name = "" if ref.startswith("sha256:") else ref.rpartition("/")[2]
    origin = Origin(format="raw", builder=f"vmjobs {__version__}")
    return Brought(name, digest, origin, contents, lambda _parts: manifest)


def from_file(path: Path, wishes: Wishes) -> Brought:
    """Prepare a disk in a file.

    Raises:
        ImageRejected: the inspection refuses the file; the message says why.
        InvalidRequest: the options contradict each other.
    """
    described = admit(path, wishes.pinned)
    if wishes.pinned is None:
        say(f"{path.name} is {described.format}: {described.virtual_size} bytes of disk")
    stack = ExitStack()
    disk = path if described.format is Format.RAW else _converted(path, described, stack)
    boot, partition = _boot(disk, path.name, wishes)
    contents = [_Content("root", disk)]
    contents += [_Content("kernel", wishes.kernel)] if wishes.kernel else []
    contents += [_Content("initrd", wishes.initrd)] if wishes.initrd else []
    origin = Origin(
        file=path.name[:255], format=described.format.value, builder=f"vmjobs {__version__}"
    )

    def finish(parts: dict[str, Part]) -> ImageManifest:
        return ImageManifest(
            architecture=wishes.architecture,
            boot=boot,
            root=parts["root"],
            partition=partition,
            kernel=parts.get("kernel"),
            initrd=parts.get("initrd"),
            cmdline=wishes.cmdline,
            guest=GuestSupport() if wishes.guest else None,
            cloud_init=wishes.cloud_init,
        )

    _check_fits(finish, contents)
    return Brought(_plain_name(path), os.fspath(path.resolve()), origin, contents, finish, stack)


def _converted(path: Path, described: Description, stack: ExitStack) -> Path:
    """Convert a disk to a raw file; keep that file until the push succeeds."""
    from images.convert import to_raw  # noqa: PLC0415 - raw files need no sandbox

    folder = cache_folder("converted")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = f"{path.resolve()}\n{mark_of(path)}".encode("utf-8", "surrogateescape")
    raw = folder / f"{hashlib.sha256(key).hexdigest()[:32]}.raw"
    for old in folder.iterdir():
        if old != raw and old.stat().st_mtime < time.time() - KEEP_SECONDS:
            old.unlink(missing_ok=True)
    if not raw.is_file():
        with bar(f"converting {path.name}", described.virtual_size) as shown:
            to_raw(
                path, described, raw, progress=lambda part: shown(int(part * described.virtual_size))
            )
    stack.push(lambda kind, _error, _trace: raw.unlink(missing_ok=True) if kind is None else None)
    return raw


def _boot(disk: Path, name: str, wishes: Wishes) -> tuple[BootMethod, int]:
    """Return the boot method, and the root partition if a kernel boots it, else 0.

    Raises:
        InvalidRequest: the boot method is neither given nor detected.
    """
    found = boot_of(disk)
    method = wishes.boot or (BootMethod.KERNEL if wishes.kernel else found.boot)
    if method is None:
        raise InvalidRequest(f"{name}: {found.why}", hint="give the boot method: --boot")
    if wishes.boot is None and wishes.kernel is None:
        say(f"{name} boots by {method} ({found.why}); --boot changes that")
    if wishes.partition is not None:
        return method, wishes.partition
    return method, found.partition if method is BootMethod.KERNEL else 0


def _check_fits(finish: Callable[[dict[str, Part]], ImageManifest], contents: list[_Content]) -> None:
    """Check before the upload that the manifest will be valid."""
    stand_in = Part(digest="tree:" + "0" * 64, size=1)
    try:
        finish({content.role: stand_in for content in contents})
    except ValidationError as error:
        faults = faults_of(error)
        listing = "; ".join(fault.message for fault in faults)
        raise InvalidRequest(f"the image would be invalid: {listing}", faults=faults) from error


def _plain_name(path: Path) -> str:
    """Derive an image's name from the file's name."""
    stem = re.sub(r"\.(raw|img|qcow2|vmdk|vdi|vhdx|bin|disk)$", "", path.name.lower())
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("._-")[:64]


# --------------------------------------------------------------------------- upload


def send(images: Images, service: str, brought: Brought, parallel: int) -> Sent:
    """Upload all contents that the repository lacks.

    Raises:
        InvalidRequest, Conflict: a file cannot be read, or changes. Also errors of the service.
    """
    note = UploadNote(cache_folder(NOTES), service, brought.source)
    upload = _upload(images, note, brought.size)
    parts: dict[str, Part] = {}
    wire = 0
    with bar(brought.name or "pushing", brought.size) as shown, _giving_up(upload, note):
        for content in brought.contents:
            layout, sent = _send_content(upload, content, parallel, shown)
            parts[content.role] = Part(digest=layout.digest, size=layout.size)
            wire += sent
            shown.next()
    return Sent(brought.finish(parts), upload, note, brought.origin, brought.size, wire)


@contextmanager
def _giving_up(upload: UploadClient, note: UploadNote) -> Iterator[None]:
    """Drop an upload that exceeds a limit: its data would count until it expires."""
    try:
        yield
    except PayloadTooLarge:
        note.forget()
        with suppress(VMJobsError):
            upload.drop()
        raise


def publish(images: Images, sent: Sent, wanted: Name, terms: Terms) -> ImageDetail:
    """Publish an uploaded image.

    Raises:
        ImageRejected: the service refuses the image. Also other errors of the service.
    """
    digest = sent.manifest.digest
    publication = Publication(
        manifest=sent.manifest.model_dump(mode="json", by_alias=True),
        upload=sent.upload.id,
        namespace=wanted.namespace,
        name=wanted.name,
        tag=wanted.tag,
        visibility=terms.visibility,
        shares=terms.shares,
        keep_days=terms.keep_days,
        origin=sent.origin,
        signature=sign(digest, private_key(terms.key)) if terms.key else "",
    )
    with _giving_up(sent.upload, sent.note):
        found = images.publish(publication)
    sent.note.forget()
    return found


def _send_content(
    upload: UploadClient, content: _Content, parallel: int, shown: Bar
) -> tuple[Layout, int]:
    sent = 0

    def moved(done: int, wire: int) -> None:
        nonlocal sent
        sent = wire
        shown(done, wire)

    if content.layout is not None:
        layout = send_content(
            content.path, upload, layout=content.layout, workers=parallel, moved=moved
        )
        return layout, sent
    with closing(Notes.open(cache_folder(NOTES), content.path)) as notes:
        layout = send_content(content.path, upload, memory=notes, workers=parallel, moved=moved)
    return layout, sent


def _upload(images: Images, note: UploadNote, size: int) -> UploadClient:
    """Resume the upload of an earlier push, or open a new one."""
    if known := note.recall():
        try:
            found = images.upload(known)
            if found.about.size >= size:
                return found
            found.drop()
        except NotFound:
            pass  # it expired; its data may still exist
    found = images.open_upload(max(1, size))
    note.remember(found.id)
    return found
