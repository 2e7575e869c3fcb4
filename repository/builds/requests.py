"""Builds of images in the database: requests, progress, and the queue for builders.

The builder's part is :mod:`repository.builds.build_worker`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, defer

from repository.builds.rows import (
    BuildTask,
    build_view,
    end_build,
    image_names,
    new_row,
    set_progress,
    task_of,
    validate_recipe,
)
from repository.db.database import Database
from repository.db.ids import full_id, is_id
from repository.db.models import BuildRow
from repository.db.sql import take_transaction_lock
from repository.images import Viewer
from repository.images.names import check_name
from repository.images.permissions import require_namespace
from repository.jobs.views import PublishArray
from vmjobs.errors import (
    Conflict,
    IdempotencyConflict,
    NotFound,
    PayloadTooLarge,
    Unavailable,
    VMJobsError,
)
from vmjobs.model import now as utc_now
from vmjobs.wire import Build, BuildRequest, BuildState

logger = logging.getLogger(__name__)

#: Builds of one owner that may wait or run.
MAX_ACTIVE: Final = 20
#: How often a build is begun again after its builder died.
MAX_RESTARTS: Final = 3
#: A build without a builder is sent to the queue again after this time, which doubles each time.
RESEND_AFTER: Final = timedelta(seconds=60)
RESEND_DOUBLINGS: Final = 6
MAX_LIST: Final = 1000
#: Ended builds kept for each owner; older ones are deleted. Their images stay.
MAX_ENDED: Final = 200
#: Characters of a recipe as JSON.
MAX_RECIPE_LENGTH: Final = 1024 * 1024
BUILDER_LOST: Final = "BUILDER_LOST"
CANCELED: Final = "CANCELED"
ACTIVE_STATES: Final = tuple(state.value for state in BuildState if not state.final)


class BuildSuperseded(Conflict):
    """Another builder has taken the build over, or it has ended: this builder has to stop."""


@dataclass(frozen=True)
class Builds:
    """Builds by the service. Every method may raise Unavailable("database")."""

    database: Database

    # -- for users

    def create(
        self, viewer: Viewer, request: BuildRequest, key: str = "", publish: PublishArray | None = None
    ) -> Build:
        """Store a build and publish its id before the commit. The same key returns the same build.

        Raises:
            InvalidRequest: with every fault of the recipe; or it needs packages of a site's own.
            PayloadTooLarge: the recipe is too long. Forbidden: not the viewer's namespace.
            Conflict: too many builds of the viewer wait or run.
            IdempotencyConflict: ``key`` was used for another request.
            Unavailable: what ``publish`` raises (``broker``); then nothing is stored.
        """
        recipe = validate_recipe(request.recipe)
        namespace = require_namespace(viewer, request.namespace)
        name, tags = image_names(request, recipe)
        for tag in tags:
            check_name(namespace, name, tag)
        body = request.model_dump(mode="json")
        body["recipe"] = recipe.model_dump(mode="json")
        if len(json.dumps(body["recipe"])) > MAX_RECIPE_LENGTH:
            raise PayloadTooLarge(f"the recipe has more than {MAX_RECIPE_LENGTH} characters")
        if seen := self._find_earlier(viewer.user, key, body):
            return seen
        row = new_row(viewer, key, body, f"{namespace}/{name}:{tags[0]}")
        try:
            with self.database.write() as session:
                _prune_builds(session, viewer.user)
                session.add(row)
                session.flush()
                if publish is not None:
                    publish(row.id)
                return build_view(row)
        except IntegrityError as error:  # a concurrent request with the same key was first
            if seen := self._find_earlier(viewer.user, key, body):
                return seen
            raise Unavailable("database", f"the build was not stored: {error.orig}") from error

    def _find_earlier(self, owner: str, key: str, body: dict[str, Any]) -> Build | None:
        if not key:
            return None
        query = select(BuildRow).where(BuildRow.owner == owner, BuildRow.key == key)
        with self.database.read() as session:
            row = session.scalars(query).one_or_none()
            if row is not None and row.request != body:
                raise IdempotencyConflict(
                    "this idempotency key was used for another build",
                    hint="use a fresh key for each new build",
                )
            return None if row is None else build_view(row)

    def list(self, owner: str, limit: int = 100) -> list[Build]:
        """The owner's builds, newest first."""
        query = select(BuildRow).where(BuildRow.owner == owner).order_by(BuildRow.id.desc())
        query = query.options(defer(BuildRow.request))  # each may have a megabyte
        with self.database.read() as session:
            return [
                build_view(row) for row in session.scalars(query.limit(max(1, min(limit, MAX_LIST))))
            ]

    def full_id(self, text: str, owner: str | None) -> str:
        """Return the id of the build whose id begins with ``text``; else ``text``.

        Raises AmbiguousId.
        """
        among = [BuildRow.owner == owner] if owner is not None else []
        with self.database.read() as session:
            return full_id(session, BuildRow.id, text, *among)

    def get(self, build: str, owner: str | None = None) -> Build:
        """Return one build.  Raises NotFound, also for another owner's build."""
        with self.database.read() as session:
            row = session.get(BuildRow, build) if is_id(build) else None
            if row is None or owner not in {None, row.owner}:
                raise _build_not_found(build)
            return build_view(row)

    def cancel(self, build: str, viewer: Viewer) -> Build:
        """Cancel a build of the viewer, or any build for administrators. Repeating it is no error.

        Its builder notices within seconds, stops, and publishes nothing.

        Raises NotFound; Conflict if the build has ended, or its image is being published.
        """
        with self.database.write() as session:
            row = _lock_build(session, build)
            if not viewer.admin and viewer.user != row.owner:
                raise _build_not_found(build)
            if row.code != CANCELED:
                if BuildState(row.state).final:
                    raise Conflict(f"the build {build} is {row.state} and cannot be canceled any more")
                if row.naming:
                    hint = "remove the image once it is there"
                    raise Conflict(f"the image of the build {build} is being published", hint=hint)
                text = f"canceled by {viewer.user} while it was {row.state}"
                end_build(row, BuildState.FAILED, CANCELED, text)
            return build_view(row)

    # -- for builders

    def begin(self, build: str) -> BuildTask | None:
        """Begin a build, whose lock the caller holds. Return ``None`` if there is nothing to do.

        A build that was begun too often without an end fails.  Raises NotFound.
        """
        with self.database.write() as session:
            row = _lock_build(session, build)
            if BuildState(row.state).final:
                return None
            if row.attempts > MAX_RESTARTS:
                text = f"the builder ended {row.attempts} times in the middle of this build"
                why = "it may need more memory or disk than the builder has; its log says more"
                end_build(row, BuildState.FAILED, BUILDER_LOST, text, why)
                return None
            row.attempts += 1
            row.generation += 1
            row.naming = False
            row.sent, row.sends = utc_now(), 0
            set_progress(row, BuildState.BUILDING, "starting", 0.0)
            return task_of(row)

    def progress(self, work: BuildTask, state: BuildState, step: str, fraction: float) -> None:
        """Record the progress of a build.  Raises BuildSuperseded."""
        with self.database.write() as session:
            set_progress(_lock_current(session, work), state, step[:200], fraction)

    def check_current(self, work: BuildTask) -> None:
        """Check that this builder still has the build.  Raises BuildSuperseded."""
        with self.database.read() as session:
            _check_current(session.get(BuildRow, work.id, options=[defer(BuildRow.request)]), work)

    def name(self, work: BuildTask) -> None:
        """Begin to publish the image: the build cannot be canceled any more.

        Raises BuildSuperseded.
        """
        with self.database.write() as session:
            row = _lock_current(session, work)
            row.naming = True
            set_progress(row, BuildState.PUBLISHING, "giving it its names", row.progress / 1000)

    def finish(self, work: BuildTask, digest: str) -> None:
        """Record that the image is published. Repeating it is no error.  Raises BuildSuperseded."""
        with self.database.write() as session:
            row = _lock_build(session, work.id)
            if row.state == BuildState.DONE.value and row.digest == digest:
                return
            row = _lock_current(session, work)
            row.digest, row.progress = digest, 1000
            end_build(row, BuildState.DONE, "", "")

    def fail(self, work: BuildTask, error: VMJobsError) -> None:
        """End the build without an image.  Raises BuildSuperseded."""
        with self.database.write() as session:
            end_build(
                _lock_current(session, work), BuildState.FAILED, error.code, error.message, error.hint
            )

    def postpone(self, work: BuildTask, why: str) -> None:
        """Let the build wait for a service that does not answer; this was no attempt.

        Raises BuildSuperseded.
        """
        with self.database.write() as session:
            row = _lock_current(session, work)
            row.attempts -= 1
            row.generation += 1
            row.naming = False
            set_progress(row, BuildState.QUEUED, f"waiting: {why}"[:200], 0.0)

    # -- builds without a builder

    def mark_abandoned_as_sent(self) -> Sequence[str]:
        """Return builds that were begun and whose builder is gone; mark them as sent."""
        begun = [state for state in ACTIVE_STATES if state != BuildState.QUEUED.value]
        query = select(BuildRow.id).where(BuildRow.state.in_(begun)).order_by(BuildRow.id)
        with self.database.read() as session:
            found = session.scalars(query).all()
        return [build for build in found if self._mark_as_sent(build, utc_now())]

    def mark_overdue_as_sent(self, present: datetime | None = None) -> Sequence[str]:
        """Return builds without a builder whose message has to be sent again; mark them as sent."""
        present = present or utc_now()
        query = select(BuildRow.id, BuildRow.sent, BuildRow.sends).where(
            BuildRow.state.in_(ACTIVE_STATES)
        )
        with self.database.read() as session:
            waiting = session.execute(query.order_by(BuildRow.id)).all()
        late = [row.id for row in waiting if present - row.sent > resend_interval(row.sends)]
        return [build for build in late if self._mark_as_sent(build, present)]

    def _mark_as_sent(self, build: str, present: datetime) -> bool:
        with self.database.exclusive(lock_name(build)) as alone:
            if not alone:
                return False
            with self.database.write() as session:
                row = _lock_build(session, build)
                if BuildState(row.state).final:
                    return False
                row.sent, row.sends = present, row.sends + 1
                return True


def lock_name(build: str) -> str:
    """Name of the lock that a builder holds while it works on a build."""
    return f"build {build}"


def resend_interval(sends: int) -> timedelta:
    """How long after the last of ``sends`` messages another one is sent."""
    return RESEND_AFTER * (1 << min(max(sends - 1, 0), RESEND_DOUBLINGS))


def _prune_builds(session: Session, owner: str) -> None:
    """Delete the owner's oldest builds.  Raises Conflict: too many of them wait or run."""
    take_transaction_lock(session, f"builds of {owner}")
    mine = BuildRow.owner == owner
    query = select(func.count()).where(mine, BuildRow.state.in_(ACTIVE_STATES))
    if (session.scalar(query) or 0) >= MAX_ACTIVE:
        raise Conflict(
            f"{MAX_ACTIVE} builds of {owner} wait or run already",
            hint="wait for them, or cancel some",
        )
    ended = select(BuildRow.id).where(mine, BuildRow.state.not_in(ACTIVE_STATES))
    old = session.scalars(ended.order_by(BuildRow.id.desc()).offset(MAX_ENDED).limit(MAX_ENDED)).all()
    session.execute(delete(BuildRow).where(BuildRow.id.in_(old)))


def _lock_build(session: Session, build: str) -> BuildRow:
    """Return a build's row, locked until the transaction ends.  Raises NotFound."""
    row = session.get(BuildRow, build, with_for_update=True) if is_id(build) else None
    if row is None:
        raise _build_not_found(build)
    return row


def _lock_current(session: Session, work: BuildTask) -> BuildRow:
    return _check_current(_lock_build(session, work.id), work)


def _check_current(row: BuildRow | None, work: BuildTask) -> BuildRow:
    if row is None:
        raise BuildSuperseded(f"the build {work.id} was deleted")
    if row.generation != work.generation or BuildState(row.state).final:
        raise BuildSuperseded(
            f"the build {work.id} is {row.state} and no longer belongs to this builder"
        )
    return row


def _build_not_found(build: str) -> NotFound:
    return NotFound(f"there is no build {build[:64]}")
