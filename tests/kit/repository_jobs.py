"""Helpers for tests of the repository: small makers, and a scheduler that tests script."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from images.content import SEGMENT_BYTES, ContentLayout
from images.manifest import ImageManifest, Part
from repository.db.database import Database
from repository.db.paging import PageRequest
from repository.images import LIBRARY, Viewer
from repository.jobs.dispatcher import DispatchContext
from repository.migrations import upgrade
from repository.service import Repository, open_repository
from tests.kit.segments import compute_layout_of_bytes, encode_segment
from vmjobs.batch import BatchJob, BatchStatus, Observation
from vmjobs.cluster.wire import Cluster
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import (
    AttemptClaim,
    CondorRef,
    ExitChannel,
    ExitStatus,
    Job,
    JobAction,
    JobSpec,
    JobState,
    ReasonCode,
    Report,
    Submission,
    now,
    reason,
)
from vmjobs.wire import ImageDetail, ImageInfo, Publication

#: The states that an agent reports, in order.
WAY = (JobState.STAGING, JobState.BOOTING, JobState.RUNNING, JobState.COLLECTING)


ADMIN = Viewer("the operator", admin=True)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def refused(error: type[Exception], *calls: Callable[[], object], match: str | None = None) -> None:
    """Verify that each of these calls raises this error."""
    for call in calls:
        with pytest.raises(error, match=match):
            call()


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Collect the database's statements, with their parameters."""
    asked: list[tuple[str, Any]] = []

    def note(_link: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if not statement.startswith("BEGIN"):
            asked.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def migrated_sqlite(path: Path) -> str:
    """Write an empty database of the newest schema, and its directory; returns its URL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_migrated())
    return f"sqlite:///{path}"


@cache
def _migrated() -> bytes:
    """Migrate once and copy the result: a migration takes longer than many tests."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "vmjobs.db"
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()


def send(repository: Repository, viewer: Viewer, upload: str, data: bytes) -> ContentLayout:
    """Upload a content, as a client does."""
    layout = compute_layout_of_bytes(data)
    stored = dict(layout.stored())
    answers = repository.uploads.missing_segments(viewer, upload, list(stored.values()))
    for (number, digest), missing in zip(stored.items(), answers, strict=True):
        if missing:
            piece = data[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES]
            repository.segments.put(viewer, upload, digest, encode_segment(piece))
    repository.uploads.put_content(viewer, upload, layout.digest, layout.to_bytes())
    return layout


def push(
    repository: Repository,
    viewer: Viewer,
    data: bytes = b"a very small disk",
    kernel: bytes = b"",
    manifest: dict[str, Any] | None = None,
    **wish: Any,
) -> ImageDetail:
    """Upload a disk (and a kernel), and make an image of it. wish: fields of the publication."""
    upload = repository.uploads.begin(viewer, len(data) + len(kernel)).id
    parts = {"root": data, "kernel": kernel} if kernel else {"root": data}
    sent = {name: send(repository, viewer, upload, value) for name, value in parts.items()}
    made = {name: Part(digest=layout.digest, size=layout.size) for name, layout in sent.items()}
    image = ImageManifest.model_validate({**made, **(manifest or {})})
    body = {"manifest": image.model_dump(mode="json", by_alias=True), "upload": upload, **wish}
    return repository.publisher.publish(viewer, Publication.model_validate(body))


def images_of(repository: Repository, viewer: Viewer) -> list[ImageInfo]:
    """The images that the viewer may use; not more than a page."""
    return repository.catalog.page(viewer, PageRequest())[0]


def clusters_of(repository: Repository) -> list[Cluster]:
    """All clusters, without their VMs; not more than a page."""
    return repository.clusters.page(PageRequest())[0]


def with_settings(repository: Repository, **settings: object) -> Repository:
    config = repository.config.model_copy(update=settings)
    return Repository(config, repository.database, repository.objects)


def push_library(
    repository: Repository, name: str = "hep", data: bytes = b"a very small disk"
) -> ImageDetail:
    """Publish an image that all users may boot."""
    wish = {"namespace": LIBRARY, "name": name, "visibility": "public"}
    # Its kernel lets every hypervisor boot it; such a guest's VMs can be checkpointed.
    return push(repository, ADMIN, data, b"a kernel", {"guest": {"contract": 3}}, **wish)


def prepare_library(
    directory: Path, name: str = "hep", data: bytes = b"a very small disk"
) -> ImageDetail:
    """Write a data directory whose library has an image: a database and objects.

    They are copied, because pushing the image takes longer than many tests.
    """
    folder, image = _library(name, data)
    shutil.copytree(folder.name, directory, dirs_exist_ok=True)
    return image


@cache
def _library(name: str, data: bytes) -> tuple[tempfile.TemporaryDirectory[str], ImageDetail]:
    folder = tempfile.TemporaryDirectory()  # removed when this process ends
    place = Path(folder.name)
    url = migrated_sqlite(place / "vmjobs.db")
    with closing(open_repository(Config(data_dir=place, database_url=url), migrate=False)) as opened:
        return folder, push_library(opened, name, data)


class Ledger:
    """A simulated scheduler: it records actions, and reports what the test sets.

    down: raise Unavailable.  queue: job id to its location and status, as the schedd knows them.
    """

    def __init__(self) -> None:
        self.down = False
        self.queue: dict[str, Observation] = {}
        self.submitted = 0
        self.removed: list[CondorRef] = []
        self.acts: list[tuple[JobAction, int]] = []
        self.forgotten: list[str] = []
        self.tokens: dict[str, str] = {}

    def _check(self) -> None:
        if self.down:
            raise Unavailable("schedd", "the schedd does not answer")

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        self._check()
        for job in jobs:
            if job.id not in self.queue:
                self.submitted += 1
                ref = CondorRef(schedd="schedd.grid", cluster=self.submitted, proc=job.index)
                self.queue[job.id] = Observation(job.id, BatchStatus.IDLE, ref)
                self.tokens[job.id] = job.token
        return {job.id: self.queue[job.id].ref for job in jobs}

    def act(self, action: JobAction, refs: Sequence[CondorRef], why: str) -> None:
        self._check()
        assert why
        self.acts.append((action, len(refs)))
        self.removed += refs if action is JobAction.CANCEL else []
        became = {JobAction.CANCEL: BatchStatus.REMOVED, JobAction.HOLD: BatchStatus.HELD}
        for seen in list(self.queue.values()):
            if seen.ref in refs:
                self.say(seen.job_id, became.get(action, BatchStatus.IDLE), why)

    def say(
        self, job_id: str, status: BatchStatus, why: str = "", exit_code: int | None = None
    ) -> Observation:
        """Set what the schedd knows of a job."""
        ref = self.queue[job_id].ref
        self.queue[job_id] = Observation(job_id, status, ref, why, exit_code)
        return self.queue[job_id]

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        self._check()
        return list(self.queue.values())

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        self._check()
        nowhere = CondorRef(schedd="", cluster=0, proc=0)
        return [self.queue.get(i, Observation(i, BatchStatus.MISSING, nowhere)) for i in job_ids]

    def forget(self, array: str) -> None:
        self._check()
        self.forgotten.append(array)


def dispatch_context(repository: Repository, scheduler: Ledger) -> DispatchContext:
    return DispatchContext(repository, scheduler, lambda job, owner, _: f"token {job} {owner}")


def submission(count: int = 1, **changes: object) -> Submission:
    values = {"image": "hep", "script": "#!/bin/sh\necho hello\n", **changes}
    return Submission(spec=JobSpec.model_validate(values), count=count)


def one(repository: Repository, owner: str = "ada", **changes: Any) -> Job:
    return repository.submissions.submit(owner, submission(**changes)).jobs[0]


def claim(repository: Repository, job_id: str, node: str = "node1") -> str:
    """Claim a job; returns the attempt's id."""
    attempt = secrets.token_hex(16)
    repository.attempts.claim(job_id, AttemptClaim(attempt=attempt, node=node))
    return attempt


def told(
    state: JobState, code: ReasonCode = ReasonCode.PROGRESS, exit_code: int | None = None
) -> Report:
    status = None if exit_code is None else ExitStatus(code=exit_code, channel=ExitChannel.ENDPOINT)
    return Report(state=state, reason=reason(code), time=now(), exit=status)


def bring(repository: Repository, job_id: str, attempt: str, to: JobState) -> None:
    """Report every state on the way to ``to``."""
    for state in WAY[: WAY.index(to) + 1]:
        repository.attempts.report(job_id, attempt, told(state))


def states(repository: Repository, job_id: str) -> list[str]:
    return [event.state.value for event in repository.jobs.events(job_id)]
