"""Prepares a file or an image of the local store, uploads and publishes it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from images.cli.common import ByteProgress, QualifiedName, byte_progress, cache_folder
from images.content import ContentLayout
from images.formats import Format, ImageDescription
from images.inspect.bootinfo import detect_boot
from images.inspect.inspection import inspect_image
from images.manifest import GuestSupport, ImageManifest, Part
from images.signature import read_private_key, sign
from images.store.files import mark_of
from images.store.image_store import ImageStore
from images.transfer.push import send_content
from images.transfer.upload_state import MAX_AGE_SECONDS, FileDigestCache, UploadState
from images.transfer.worker_threads import THREADS
from vmjobs import __version__
from vmjobs.cli.common import config, echo
from vmjobs.client.images import Images
from vmjobs.client.uploads import UploadClient
from vmjobs.errors import InvalidRequest, NotFound, PayloadTooLarge, VMJobsError
from vmjobs.model import BootMethod, faults_of
from vmjobs.wire import ImageDetail, Origin, Publication, Share, Visibility

STATE_FOLDER = "push"


@dataclass(frozen=True)
class CommandOptions:
    """Command-line options about a file to push."""

    pinned: str | None = None
    boot: BootMethod | None = None
    kernel: Path | None = None
    initrd: Path | None = None
    cmdline: tuple[str, ...] = ()
    partition: int | None = None
    cloud_init: bool = False
    guest: bool = False
    xen: bool = False
    architecture: str = "x86_64"


@dataclass(frozen=True)
class PublishOptions:
    """Visibility, retention and signature of an image. key: a private key."""

    visibility: Visibility = Visibility.PRIVATE
    shares: tuple[Share, ...] = ()
    keep_days: int = 0
    key: Path | None = None


@dataclass(frozen=True)
class _PushedPart:
    """A part of an image: its role, its file, and its layout if known."""

    role: str
    path: Path
    layout: ContentLayout | None = None


@dataclass(frozen=True)
class PendingPush:
    """An image to push. source: identifies it on this host. finish: makes the manifest.

    converted: the raw copy of its disk, if there is one; it is kept until a push succeeds.
    """

    name: str
    source: str
    origin: Origin
    contents: list[_PushedPart]
    finish: Callable[[dict[str, Part]], ImageManifest]
    converted: Path | None = None

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(content.path.stat().st_size for content in self.contents)


# --------------------------------------------------------------------------- sources


def from_store(store: ImageStore, ref: str) -> PendingPush:
    """Prepare an image of the local store.

    Raises:
        NotFound: the image does not exist. DigestMismatch: it is damaged.
    """
    digest = store.resolve(ref)
    manifest = store.manifest(digest)
    contents = [
        _PushedPart(part.digest, store.folder.verify(part.digest), store.folder.layout(part.digest))
        for part in manifest.parts()
    ]
    name = "" if ref.startswith("sha256:") else ref.rpartition("/")[2]
    origin = Origin(format="raw", builder=f"vmjobs {__version__}")
    return PendingPush(name, digest, origin, contents, lambda _parts: manifest)


def from_file(path: Path, options: CommandOptions) -> PendingPush:
    """Prepare a disk in a file.

    Raises:
        ImageRejected: the inspection refuses the file; the message says why.
        InvalidRequest: the options contradict each other.
    """
    described = inspect_image(path, options.pinned)
    if options.pinned is None:
        echo(f"{path.name} is {described.format}: {described.virtual_size} bytes of disk", err=True)
    converted = None if described.format is Format.RAW else _convert_to_raw(path, described)
    disk = converted or path
    boot, partition = _boot_method(disk, path.name, options)
    contents = [_PushedPart("root", disk)]
    contents += [_PushedPart("kernel", options.kernel)] if options.kernel else []
    contents += [_PushedPart("initrd", options.initrd)] if options.initrd else []
    origin = Origin(
        file=path.name[:255], format=described.format.value, builder=f"vmjobs {__version__}"
    )

    def finish(parts: dict[str, Part]) -> ImageManifest:
        return ImageManifest(
            architecture=options.architecture,
            boot=boot,
            root=parts["root"],
            partition=partition,
            kernel=parts.get("kernel"),
            initrd=parts.get("initrd"),
            cmdline=options.cmdline,
            guest=GuestSupport() if options.guest else None,
            xen=options.xen,
            cloud_init=options.cloud_init,
        )

    _check_manifest(finish, contents)
    return PendingPush(
        _name_from_file(path), os.fspath(path.resolve()), origin, contents, finish, converted
    )


def _convert_to_raw(path: Path, described: ImageDescription) -> Path:
    """Convert a disk to a raw file, unless an earlier push of it has."""
    from images.inspect.convert import to_raw  # noqa: PLC0415 - raw files need no sandbox

    folder = cache_folder("converted")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = f"{path.resolve()}\n{mark_of(path.stat())}".encode("utf-8", "surrogateescape")
    raw = folder / f"{hashlib.sha256(key).hexdigest()[:32]}.raw"
    for old in folder.iterdir():
        if old != raw and old.stat().st_mtime < time.time() - MAX_AGE_SECONDS:
            old.unlink(missing_ok=True)
    if not raw.is_file():
        with byte_progress(f"converting {path.name}", described.virtual_size) as shown:
            to_raw(path, described, raw, progress=shown.show_fraction)
    return raw


def _boot_method(disk: Path, name: str, options: CommandOptions) -> tuple[BootMethod, int]:
    """Return the boot method, and the root partition if a kernel boots it, else 0.

    Raises:
        InvalidRequest: the boot method is neither given nor detected.
    """
    found = detect_boot(disk)
    method = options.boot or (BootMethod.KERNEL if options.kernel else found.boot)
    if method is None:
        raise InvalidRequest(f"{name}: {found.why}", hint="give the boot method: --boot")
    if options.boot is None and options.kernel is None:
        echo(f"{name} boots by {method} ({found.why}); --boot changes that", err=True)
    if options.partition is not None:
        return method, options.partition
    return method, found.partition if method is BootMethod.KERNEL else 0


def _check_manifest(
    finish: Callable[[dict[str, Part]], ImageManifest], contents: list[_PushedPart]
) -> None:
    """Check before the upload that the manifest will be valid."""
    stand_in = Part(digest="tree:" + "0" * 64, size=1)
    try:
        finish({content.role: stand_in for content in contents})
    except ValidationError as error:
        faults = faults_of(error)
        listing = "; ".join(fault.message for fault in faults)
        raise InvalidRequest(f"the image would be invalid: {listing}", faults=faults) from error


def _name_from_file(path: Path) -> str:
    """Derive an image's name from the file's name."""
    stem = re.sub(r"\.(raw|img|qcow2|vmdk|vdi|vhdx|bin|disk)$", "", path.name.lower())
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("._-")[:64]


# --------------------------------------------------------------------------- upload


def send_and_publish(
    images: Images,
    pending: PendingPush,
    wanted: QualifiedName,
    options: PublishOptions,
    parallel: int = THREADS,
) -> tuple[ImageDetail, int]:
    """Upload all contents that the repository lacks, and publish the image.

    Returns the image as published, and the number of bytes sent.

    Raises:
        InvalidRequest, Conflict: a file cannot be read, or changes.
        ImageRejected: the service refuses the image. Also other errors of the service.
    """
    note = UploadState(cache_folder(STATE_FOLDER), config().api_url, pending.source)
    upload = _resume_or_open_upload(images, note, pending.size)
    parts: dict[str, Part] = {}
    sent = 0
    with _drop_if_too_large(upload, note):
        with byte_progress(pending.name or "pushing", pending.size) as shown:
            for content in pending.contents:
                layout = _send_content(upload, content, parallel, shown)
                parts[content.role] = Part(digest=layout.digest, size=layout.size)
                sent += shown.sent
                shown.start_next_part()
        manifest = pending.finish(parts)
        publication = Publication(
            manifest=manifest.model_dump(mode="json", by_alias=True),
            upload=upload.id,
            namespace=wanted.namespace,
            name=wanted.name,
            tag=wanted.tag,
            visibility=options.visibility,
            shares=options.shares,
            keep_days=options.keep_days,
            origin=pending.origin,
            signature=sign(manifest.digest, read_private_key(options.key)) if options.key else "",
        )
        found = images.publish(publication)
    note.clear()
    if pending.converted is not None:
        pending.converted.unlink(missing_ok=True)
    return found, sent


@contextmanager
def _drop_if_too_large(upload: UploadClient, note: UploadState) -> Iterator[None]:
    """Drop an upload that exceeds a limit: its data would count until it expires."""
    try:
        yield
    except PayloadTooLarge:
        note.clear()
        with suppress(VMJobsError):
            upload.drop()
        raise


def _send_content(
    upload: UploadClient, content: _PushedPart, parallel: int, shown: ByteProgress
) -> ContentLayout:
    if content.layout is not None:
        return send_content(
            content.path, upload, layout=content.layout, workers=parallel, on_progress=shown
        )
    with closing(FileDigestCache.open(cache_folder(STATE_FOLDER), content.path)) as notes:
        return send_content(
            content.path, upload, digest_cache=notes, workers=parallel, on_progress=shown
        )


def _resume_or_open_upload(images: Images, note: UploadState, size: int) -> UploadClient:
    """Resume the upload of an earlier push, or open a new one."""
    if known := note.load():
        try:
            found = images.upload(known)
            if found.about.size >= size:
                return found
            found.drop()
        except NotFound:
            pass  # it expired; its data may still exist
    found = images.open_upload(max(1, size))
    note.save(found.id)
    return found
