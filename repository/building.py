"""A builder's work: take a build up, make the image, have it boot, and only then publish it.

May be repeated, run twice at once, or be cut short by ``kill -9`` at any point.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from images.build.bootstrap import archive_lock
from images.build.builder import BootTest, build_recipe
from images.build.workplace import Workplace, remove_leftovers
from images.files import free
from images.local_gc import collect_local
from images.push import send_content
from images.recipe import Recipe
from images.store import ImageStore
from repository.build_rows import Work
from repository.builds import Builds, Superseded, lock_name
from repository.images import Images, Viewer
from repository.service import Repository
from vmjobs import __version__
from vmjobs.errors import BuildTimedOut, NotFound, Unavailable, VMJobsError
from vmjobs.model import MIB
from vmjobs.wire import BuildState, Origin, Publication

logger = logging.getLogger(__name__)

#: Parts of the way at which the boot test and the publishing begin.
TESTING, PUBLISHING = 0.7, 0.85
#: Seconds between two notes of progress within a step.
NOTE_SECONDS: Final = 1.0
#: Seconds between two looks at whether a build is still wanted.
CHECK_SECONDS: Final = 1.0
#: With less than this free (bytes), downloads and nameless images of earlier builds go.
ROOM: Final = 4096 * MIB

#: Makes a boot test that tells what it does.
MakeBootTest = Callable[[Callable[[str], None]], BootTest]


@dataclass(frozen=True)
class Building:
    """What a builder works with.

    workdir: where downloads and half-made disks are. seconds: what one build may take.
    """

    repository: Repository
    store: ImageStore
    workdir: Path
    boot_test: MakeBootTest
    seconds: float


def build_image(parts: Building, build: str) -> None:
    """Work on a build until it is DONE or FAILED.

    Raises NotFound where it is not committed (yet); Unavailable: it waits again.
    """
    builds = parts.repository.builds
    with parts.repository.database.exclusive(lock_name(build)) as alone:
        work = builds.begin(build) if alone else None
        if work is None:
            return  # it has ended, or somebody is at it; the sweep looks after what he leaves
        try:
            _work_on(parts, work)
        except Superseded as error:
            logger.warning("given up: %s", error.message)


def _work_on(parts: Building, work: Work) -> None:
    """Have the image published, or note why not.  Raises Superseded; Unavailable: it waits again."""
    builds, recipe = parts.repository.builds, work.recipe.name
    try:
        _clean(parts.workdir, parts.store)
        _finish(parts, work)
    except Superseded:
        raise
    except Unavailable as error:
        builds.postpone(work, error.message)
        raise
    except VMJobsError as error:
        logger.info("build %s of %s: %s", work.id, recipe, error.message)
        builds.fail(work, error)
    except OSError as error:
        logger.exception("build %s of %s", work.id, recipe)
        why = BuilderBroke(f"the builder cannot store what it makes: {error.strerror}")
        builds.fail(work, why)
    except Exception:
        logger.exception("build %s of %s", work.id, recipe)
        builds.fail(work, BuilderBroke("the builder could not cope with this recipe"))


class BuilderBroke(VMJobsError):
    """Something nobody foresaw; the builder's log has all of it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="the builder's log says more; tell those who run the service")


def _finish(parts: Building, work: Work) -> None:
    note = _Notes(parts.repository.builds, work)
    check = Orders(parts.repository.builds, work, parts.seconds)
    test = parts.boot_test(lambda text: note(BuildState.TESTING, text, TESTING))

    def step(name: str, fraction: float) -> None:
        check()
        if name not in {"boot test", "done"}:
            note(BuildState.BUILDING, name, fraction * TESTING)

    def boot(digest: str, recipe: Recipe, place: Workplace) -> None:
        note(BuildState.TESTING, "boot test", TESTING)
        test(digest, recipe, place)

    entry = build_recipe(
        work.recipe, parts.store, parts.workdir, step, work.force, boot, named=False, check=check
    )

    def sent(fraction: float) -> None:
        check()
        note(BuildState.PUBLISHING, "publishing", PUBLISHING + fraction * (1 - PUBLISHING))

    _publish(parts, work, entry.digest, sent)
    parts.repository.builds.finish(work, entry.digest)


class Orders:
    """Whether a build is to go on: nobody canceled it or took it up, and its time is not over."""

    def __init__(self, builds: Builds, work: Work, seconds: float) -> None:
        self._builds = builds
        self._work = work
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._next = 0.0

    def __call__(self) -> None:
        """Return if it is.  Raises Superseded, BuildTimedOut."""
        present = time.monotonic()
        if present > self._end:
            raise BuildTimedOut(
                f"the build was not done after {self._seconds:g} s",
                hint="give the recipe less to do, or ask those who run the service for more time",
            )
        if present < self._next:
            return
        self._next = present + CHECK_SECONDS
        try:
            self._builds.wanted(self._work)
        except Unavailable as error:  # the build itself can do without
            logger.warning("whether to go on with %s is not known: %s", self._work.id, error.message)


class _Notes:
    """Tells how far a build is: each new step, and within one every now and then."""

    def __init__(self, builds: Builds, work: Work) -> None:
        self._builds = builds
        self._work = work
        self._last: tuple[BuildState, str] | None = None
        self._when = 0.0

    def __call__(self, state: BuildState, step: str, fraction: float) -> None:
        if (state, step) == self._last and time.monotonic() < self._when + NOTE_SECONDS:
            return
        self._last, self._when = (state, step), time.monotonic()
        try:
            self._builds.progress(self._work, state, step, fraction)
        except Unavailable as error:  # the build itself can do without
            logger.warning("progress of build %s is not noted: %s", self._work.id, error.message)


class Receiver:
    """An open upload of the repository in this process, as ``images.push`` sends to one."""

    def __init__(self, images: Images, viewer: Viewer, upload: str) -> None:
        self._images, self._viewer, self._upload = images, viewer, upload

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these segments have to be sent."""
        return self._images.missing_segments(self._viewer, self._upload, digests)

    def missing_blocks(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these blocks have to be sent."""
        return self._images.missing_blocks(self._viewer, self._upload, digests)

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment."""
        return self._images.put_segment(self._viewer, self._upload, digest, bytes(body))

    def put_content(self, digest: str, layout: bytes) -> None:
        """Say of which segments a content consists."""
        self._images.put_content(self._viewer, self._upload, digest, layout)


def _publish(parts: Building, work: Work, digest: str, sent: Callable[[float], None]) -> None:
    """Have an image of the store in the repository, with all its names, as its owner's.

    sent: called with the part of it that is there; what it raises ends that.
    """
    images = parts.repository.images
    manifest = parts.store.manifest(digest)
    upload = images.open_upload(work.owner, manifest.size).id
    try:
        before = 0
        sent(0.0)
        for part in manifest.parts():

            def moved(done: int, _sent: int, before: int = before) -> None:
                sent((before + done) / manifest.size)

            send_content(
                parts.store.content_path(part.digest),
                Receiver(images, work.owner, upload),
                layout=parts.store.layout(part.digest),
                moved=moved,
            )
            before += part.size
        sent(1.0)
        parts.repository.builds.name(work)
        for tag in work.tags:
            images.publish(
                work.owner,
                Publication(
                    manifest=manifest.model_dump(mode="json", by_alias=True),
                    upload=upload,
                    namespace=work.namespace,
                    name=work.name,
                    tag=tag,
                    visibility=work.visibility,
                    origin=_origin(work),
                ),
            )
    finally:
        with suppress(NotFound, Unavailable):
            images.drop_upload(work.owner, upload)


def _origin(work: Work) -> Origin:
    recipe = f"recipe {work.recipe.name} {work.recipe.version}"
    return Origin(format="raw", builder=f"vmjobs {__version__}", source=recipe)


def _clean(workdir: Path, store: ImageStore) -> None:
    """Remove what builds that were killed left half made and, where room is short, old images."""
    workdir.mkdir(parents=True, exist_ok=True)
    remove_leftovers(workdir)
    if shutil.disk_usage(workdir).free < ROOM:
        # Whoever asks for wheels decides how large they are, also of those that prove to be others.
        for archive in workdir.glob("packages/*.tar"):
            with free(archive_lock(archive)) as unread:
                if unread:
                    archive.unlink(missing_ok=True)
        for wheel in workdir.glob("wheels/*"):
            wheel.unlink(missing_ok=True)
        collect_local(store)
