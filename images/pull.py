"""An image from a repository into a store of one's own, or a disk of it into a file.

Fetched as a node fetches it: several segments at once, checked, sparse, and continued where an
earlier attempt was broken off. Nothing that is in the store is ever given up for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from images.fetch import ContentFetch
from images.files import exclusive
from images.manifest import ImageManifest, Part
from images.remote import ImageFetcher
from images.room import Room, is_full
from images.store import ImageStore
from vmjobs.durable import sync_directory
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound, StorageFull

#: Called with the bytes of content that are done.
Step = Callable[[int], None]


class _OwnRoom(Room):
    """The room in a store whose images are there on purpose: none of them goes."""

    def __init__(self, store: ImageStore) -> None:
        super().__init__(store, 0, 0)

    def make(self) -> bool:
        return False


def pull_image(store: ImageStore, fetch: ImageFetcher, digest: str, step: Step) -> ImageManifest:
    """Have an image in the store, every byte checked.

    Raises:
        NotFound, Unavailable: as the fetcher does; what came so far is kept for the next attempt.
        DigestMismatch: what came is not what it should be.
        StorageFull: it does not fit.
    """
    manifest = ImageManifest.parse(fetch.manifest(digest), digest)
    done = 0
    for part in manifest.parts():
        _have(store, fetch, digest, part, _shifted(step, done))
        done += part.size
        step(done)
    store.put_manifest(manifest)
    return manifest


def pull_file(
    target: Path, fetch: ImageFetcher, digest: str, content: str, size: int, step: Step
) -> None:
    """Have one content of an image as a raw, sparse file; it appears whole, or not at all.

    What came of it so far is in a directory beside it. Raises as :func:`pull_image` does.
    """
    scratch = target.with_name(f".{target.name[:128]}.pull")
    try:
        store = ImageStore(scratch)
        _have(store, fetch, digest, Part(digest=content, size=size), step)
        path = store.content_path(content)
        path.chmod(0o644)
        path.replace(target)
        sync_directory(target.absolute().parent)
        shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if is_full(error):
            raise StorageFull(f"no room for {target}: {error.strerror}") from error
        raise InvalidRequest(f"cannot write {target}: {error.strerror}") from error


def _have(store: ImageStore, fetch: ImageFetcher, image: str, part: Part, step: Step) -> None:
    folder = store.folder
    with exclusive(folder.lock(part.digest)):
        try:
            folder.verified(part.digest, part.size)
        except (NotFound, DigestMismatch):
            ContentFetch(folder, _OwnRoom(store), fetch, image, part, step).run()


def _shifted(step: Step, before: int) -> Step:
    return lambda done: step(before + done)
