"""Runs a build: builds an image, boots it as a test, and publishes it if the test passes.

Every step may be repeated, run twice at once, or be cut short by ``kill -9``.
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
from images.build.builder import BootTest
from images.build.builder import build as build_recipe
from images.build.scratch_dir import ScratchDir, remove_leftovers
from images.recipe import Recipe
from images.store.files import try_exclusive_lock
from images.store.image_store import ImageStore
from images.store.local_gc import collect_garbage
from images.transfer.push import send_content
from repository.builds.requests import Builds, BuildSuperseded, lock_name
from repository.builds.rows import BuildTask
from repository.images import Viewer
from repository.service import Repository
from vmjobs import __version__
from vmjobs.errors import BuildTimedOut, NotFound, Unavailable, VMJobsError
from vmjobs.model import MIB
from vmjobs.wire import BuildState, Origin, Publication

logger = logging.getLogger(__name__)

#: Fractions of the progress at which the boot test and the publishing begin.
TESTING_AT, PUBLISHING_AT = 0.7, 0.85
#: Seconds between two progress updates within a step.
PROGRESS_SECONDS: Final = 1.0
#: Seconds between two checks whether the build was canceled.
CHECK_SECONDS: Final = 1.0
#: With less than this free (bytes), downloads and untagged images of earlier builds are removed.
MIN_FREE_BYTES: Final = 4096 * MIB

#: Makes a boot test that reports its progress to a callback.
MakeBootTest = Callable[[Callable[[str], None]], BootTest]


@dataclass(frozen=True)
class BuildContext:
    """The collaborators of a builder.

    workdir: holds downloads and unfinished disks. seconds: time limit of one build.
    """

    repository: Repository
    store: ImageStore
    workdir: Path
    boot_test: MakeBootTest
    seconds: float


def build_image(parts: BuildContext, build: str) -> None:
    """Run a build until it is DONE or FAILED.

    Raises NotFound if it is not committed (yet); Unavailable: the build waits again.
    """
    builds = parts.repository.builds
    with parts.repository.database.exclusive(lock_name(build)) as alone:
        work = builds.begin(build) if alone else None
        if work is None:
            return  # it has ended, or another builder runs it; if that one dies, the sweep finds it
        try:
            _run(parts, work)
        except BuildSuperseded as error:
            logger.warning("given up: %s", error.message)


def _run(parts: BuildContext, work: BuildTask) -> None:
    """Publish the image or record the failure.  Raises BuildSuperseded, Unavailable."""
    builds, recipe = parts.repository.builds, work.recipe.name
    try:
        _clean(parts.workdir, parts.store)
        _build_and_publish(parts, work)
    except BuildSuperseded:
        raise
    except Unavailable as error:
        builds.postpone(work, error.message)
        raise
    except VMJobsError as error:
        logger.info("build %s of %s: %s", work.id, recipe, error.message)
        builds.fail(work, error)
    except OSError as error:
        logger.exception("build %s of %s", work.id, recipe)
        why = BuilderFailed(f"the builder cannot write its files: {error.strerror}")
        builds.fail(work, why)
    except Exception:
        logger.exception("build %s of %s", work.id, recipe)
        builds.fail(work, BuilderFailed("the builder failed on this recipe"))


class BuilderFailed(VMJobsError):
    """An unexpected error; the builder's log has the traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="the builder's log says more: report it to the operators")


def _build_and_publish(parts: BuildContext, work: BuildTask) -> None:
    note = _ProgressReporter(parts.repository.builds, work)
    check_cancelled = BuildCheck(parts.repository.builds, work, parts.seconds)
    test = parts.boot_test(lambda text: note(BuildState.TESTING, text, TESTING_AT))

    def step(name: str, fraction: float) -> None:
        check_cancelled()
        if name not in {"boot test", "done"}:
            note(BuildState.BUILDING, name, fraction * TESTING_AT)

    def boot(digest: str, recipe: Recipe, place: ScratchDir) -> None:
        note(BuildState.TESTING, "boot test", TESTING_AT)
        test(digest, recipe, place)

    entry = build_recipe(
        work.recipe,
        parts.store,
        parts.workdir,
        step,
        work.force,
        boot,
        named=False,
        check_cancelled=check_cancelled,
    )

    def sent(fraction: float) -> None:
        check_cancelled()
        note(BuildState.PUBLISHING, "publishing", PUBLISHING_AT + fraction * (1 - PUBLISHING_AT))

    _publish(parts, work, entry.digest, sent)
    parts.repository.builds.finish(work, entry.digest)


class BuildCheck:
    """Checks that a build was not canceled, taken over by another builder, or timed out."""

    def __init__(self, builds: Builds, work: BuildTask, seconds: float) -> None:
        self._builds = builds
        self._work = work
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._next = 0.0

    def __call__(self) -> None:
        """Check, at most every ``CHECK_SECONDS``.  Raises BuildSuperseded, BuildTimedOut."""
        present = time.monotonic()
        if present > self._end:
            raise BuildTimedOut(
                f"the build was not done after {self._seconds:g} s",
                hint="shorten the recipe, or ask the operators for a longer limit",
            )
        if present < self._next:
            return
        self._next = present + CHECK_SECONDS
        try:
            self._builds.check_current(self._work)
        except Unavailable as error:  # the build itself does not need the database
            logger.warning("cannot check build %s for a cancel: %s", self._work.id, error.message)


class _ProgressReporter:
    """Reports a build's progress: each new step, and within a step every ``PROGRESS_SECONDS``."""

    def __init__(self, builds: Builds, work: BuildTask) -> None:
        self._builds = builds
        self._work = work
        self._last: tuple[BuildState, str] | None = None
        self._when = 0.0

    def __call__(self, state: BuildState, step: str, fraction: float) -> None:
        if (state, step) == self._last and time.monotonic() < self._when + PROGRESS_SECONDS:
            return
        self._last, self._when = (state, step), time.monotonic()
        try:
            self._builds.progress(self._work, state, step, fraction)
        except Unavailable as error:  # the build itself does not need the database
            logger.warning("cannot record progress of build %s: %s", self._work.id, error.message)


class LocalUpload:
    """An open upload of the repository in this process, a ``vmjobs.file_transfer.ContentReceiver``."""

    def __init__(self, repository: Repository, viewer: Viewer, upload: str) -> None:
        self._repository, self._viewer, self.id = repository, viewer, upload

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        return self._repository.uploads.missing_segments(self._viewer, self.id, digests)

    def missing_chunks(self, digests: Sequence[bytes]) -> list[bool]:
        return self._repository.uploads.missing_chunks(self._viewer, self.id, digests)

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        return self._repository.segments.put(self._viewer, self.id, digest, bytes(body))

    def put_content(self, digest: str, layout: bytes) -> None:
        self._repository.uploads.put_content(self._viewer, self.id, digest, layout)


def _publish(parts: BuildContext, work: BuildTask, digest: str, sent: Callable[[float], None]) -> None:
    """Upload an image of the local store and publish it under all its tags.

    sent: called with the fraction sent so far; an exception of it ends the upload.
    """
    repository = parts.repository
    manifest = parts.store.manifest(digest)
    upload = repository.uploads.begin(work.owner, manifest.size).id
    try:
        before = 0
        sent(0.0)
        for part in manifest.parts():

            def on_progress(done: int, _sent: int, before: int = before) -> None:
                sent((before + done) / manifest.size)

            send_content(
                parts.store.folder.verify(part.digest),
                LocalUpload(repository, work.owner, upload),
                layout=parts.store.folder.layout(part.digest),
                on_progress=on_progress,
            )
            before += part.size
        sent(1.0)
        repository.builds.name(work)
        for tag in work.tags:
            repository.publisher.publish(
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
            repository.uploads.drop(work.owner, upload)


def _origin(work: BuildTask) -> Origin:
    recipe = f"recipe {work.recipe.name} {work.recipe.version}"
    return Origin(format="raw", builder=f"vmjobs {__version__}", source=recipe)


def _clean(workdir: Path, store: ImageStore) -> None:
    """Remove leftovers of killed builds and, if disk space is short, downloads and old images."""
    workdir.mkdir(parents=True, exist_ok=True)
    remove_leftovers(workdir)
    if shutil.disk_usage(workdir).free < MIN_FREE_BYTES:
        # Users decide how large wheels are, even of wheels whose digest proves wrong.
        for archive in workdir.glob("packages/*.tar"):
            with try_exclusive_lock(archive_lock(archive)) as unread:
                if unread:
                    archive.unlink(missing_ok=True)
        for wheel in workdir.glob("wheels/*"):
            wheel.unlink(missing_ok=True)
        collect_garbage(store)
