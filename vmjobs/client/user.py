"""The API of jobs, nodes and the service, for users and their programs."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import quote

from vmjobs.client import files
from vmjobs.client.clusters import Clusters
from vmjobs.client.request_bodies import FileBody
from vmjobs.client.transport import FIRST_POLL_SECONDS, ApiClient, next_poll_pause, parse
from vmjobs.errors import NotFound
from vmjobs.file_transfer import ProgressCallback
from vmjobs.job_sets import JobSelection, JobStatus, JobStatusList
from vmjobs.model import (
    InputFile,
    Job,
    JobAction,
    JobEvent,
    JobSpec,
    JobState,
    Node,
    Output,
    StreamName,
    Submission,
)
from vmjobs.wire import (
    EventList,
    Health,
    ImageDetail,
    ImageInfo,
    ImageList,
    JobPage,
    NodeList,
    OutputList,
    ServiceInfo,
    Submitted,
)

#: Maximum rate of requests while waiting for many jobs.
POLLS_PER_SECOND: Final = 100


class Client(ApiClient):
    """The API for one user.

    Methods raise the error that the service answers with: ``NotFound``, ``Forbidden``,
    ``InvalidSpec`` …, and ``Unavailable`` if the service, or one that it needs, does not answer
    within the deadline.
    """

    @cached_property
    def clusters(self) -> Clusters:
        """Virtual clusters, for their operators."""
        return Clusters(self._http)

    # -- jobs

    def submit(self, spec: JobSpec, count: int = 1, *, key: str = "") -> Submitted:
        """Submit ``count`` jobs. key: makes repeats of the call harmless; default: random.

        Raises:
            InvalidSpec: with every fault of the specification.
            IdempotencyConflict: ``key`` was used with another submission.
        """
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        body = Submission(spec=spec, count=count)
        return self._http.send(Submitted, "POST", "/v1/jobs", body, headers=headers)

    def job(self, job_id: str) -> Job:
        """One job."""
        return self._http.get(Job, _job_path(job_id))

    def job_if_changed(self, job_id: str, etag: str = "") -> tuple[Job | None, str]:
        """The job and its ETag; ``None`` if the job still has this ``etag``."""
        headers = {"If-None-Match": etag} if etag else {}
        answer = self._http.call("GET", _job_path(job_id), headers=headers, accept=frozenset({304}))
        if answer.status_code == 304:
            return None, etag
        return parse(Job, answer), answer.headers.get("ETag", "")

    def job_page(
        self,
        states: Collection[JobState] = (),
        array: str = "",
        limit: int = 256,
        cursor: str = "",
    ) -> JobPage:
        """A page of the caller's jobs, newest first, and the cursor of the next page."""
        wish = {"state": ",".join(states), "array": array, "cursor": cursor, "limit": str(limit)}
        params = {name: value for name, value in wish.items() if value}
        return self._http.get(JobPage, "/v1/jobs", params)

    def jobs(self, states: Collection[JobState] = (), array: str = "") -> Iterator[Job]:
        """All of the caller's jobs, newest first, fetched page by page."""
        cursor = ""
        while True:
            page = self.job_page(states, array, cursor=cursor)
            yield from page.jobs
            cursor = page.next
            if not cursor:
                return

    def events(self, job_id: str, after: int = 0) -> list[JobEvent]:
        """A job's events past number ``after``."""
        path = f"{_job_path(job_id)}/events"
        return list(self._http.get(EventList, path, {"after": after}).events)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job.

        Raises:
            Conflict: it has ended already.
        """
        return self._http.send(Job, "DELETE", _job_path(job_id))

    def change_jobs(
        self, action: JobAction, jobs: Sequence[str] = (), states: Collection[JobState] = ()
    ) -> list[JobStatus]:
        """Cancel, hold or release many jobs in one request; returns their present states.

        jobs: ids of jobs or arrays. states: only jobs in these. Jobs that have ended are no error.

        Raises:
            NotFound: one does not exist; no job is changed.
            InvalidRequest: both are empty, or too many jobs for one request.
        """
        body = JobSelection.model_construct(jobs=tuple(jobs), state=tuple(states))
        return list(self._http.send(JobStatusList, "POST", f"/v1/jobs:{action.value}", body).jobs)

    def wait(
        self,
        job_ids: Sequence[str],
        timeout: float | None = None,
        on_change: Callable[[Job], None] | None = None,
    ) -> list[Job]:
        """Wait until all jobs are final or ``timeout`` seconds pass; returns the jobs.

        on_change: called with each job at first and whenever it has changed.
        """
        end = _end_of_wait(timeout)
        seen: dict[str, Job] = {}
        tags: dict[str, str] = {}
        pause = FIRST_POLL_SECONDS
        while True:
            waiting = [i for i in dict.fromkeys(job_ids) if i not in seen or not seen[i].state.final]
            changed = [job for i in waiting if (job := self._fetch_if_changed(i, tags)) is not None]
            for job in changed:
                seen[job.id] = job
                if on_change:
                    on_change(job)
            left = sum(1 for i in waiting if not seen[i].state.final)
            if not left or time.monotonic() >= end:
                return [seen[i] for i in job_ids]
            pause = next_poll_pause(pause, changed=bool(changed))
            self._http.pause(_limit_pause(end, max(pause, left / POLLS_PER_SECOND)))

    def _fetch_if_changed(self, job_id: str, tags: dict[str, str]) -> Job | None:
        job, tags[job_id] = self.job_if_changed(job_id, tags.get(job_id, ""))
        return job

    # -- streams and outputs

    def stream(self, job_id: str, name: StreamName, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a stream from ``offset`` to its present end."""
        return files.read_stream(self._http, f"{_job_path(job_id)}/{name.value}", offset)

    def follow(
        self, job_id: str, name: StreamName, offset: int = 0, timeout: float | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes of a stream until the job is final, or for ``timeout`` seconds.

        A new attempt writes its streams from the start; then this reads them from the start.
        """
        end = _end_of_wait(timeout)
        pause, etag, final, attempts = FIRST_POLL_SECONDS, "", False, 0
        while True:
            job, etag = self.job_if_changed(job_id, etag)
            if job:
                job_id = job.id  # the full id: a shortened one may become ambiguous later
                # The state is read before the bytes: the stream of a final job is complete by then.
                final = job.state.final
                offset = offset if attempts in {0, job.attempts} else 0
                attempts = job.attempts
            before = offset
            for data in self.stream(job_id, name, offset):
                offset += len(data)
                yield data
            if final or time.monotonic() >= end:
                return
            pause = next_poll_pause(pause, changed=offset > before)
            self._http.pause(_limit_pause(end, pause))

    def outputs(self, job_id: str) -> OutputList:
        """The outputs of a job, and those that were refused."""
        return self._http.get(OutputList, f"{_job_path(job_id)}/outputs")

    def download_output(
        self, job_id: str, output: Output, directory: Path, progress: ProgressCallback | None = None
    ) -> Path:
        """Fetch one output into ``directory``, atomically; returns its path.

        Raises:
            InvalidRequest: the output's path would leave ``directory``.
            DigestMismatch: the received bytes do not match its digest.
        """
        url = f"{_job_path(job_id)}/outputs/{quote(output.path)}"
        return files.download_output(self._http, url, directory, output, progress)

    # -- input files

    def upload_input(
        self, path: Path, name: str = "", progress: ProgressCallback | None = None
    ) -> InputFile:
        """Upload a local file, unless the repository has it. name: of the job's input.

        Raises:
            InvalidRequest: it cannot be read, or changed during the upload.
        """
        found = files.describe_input(path, name or path.name)
        if not self.has_blob(found.digest):
            with path.open("rb") as source:
                body = FileBody(source, found.size, progress)
                self._http.call("PUT", f"/v1/blobs/{found.digest}", body=body)
        elif progress:
            progress(found.size, found.size)
        return found

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has these bytes."""
        accept = frozenset({404})
        return self._http.call("HEAD", f"/v1/blobs/{digest}", accept=accept).status_code == 200

    # -- images, nodes, the service

    def images(self) -> list[ImageInfo]:
        """All images."""
        pages = self._http.pages(ImageList, "/v1/images")
        return [image for page in pages for image in page.images]

    def image(self, ref: str) -> ImageDetail:
        """One image with its manifest; more in :class:`vmjobs.client.images.Images`."""
        return self._http.get(ImageDetail, f"/v1/images/{quote(ref, safe=':/')}")

    def nodes(self) -> list[Node]:
        """All execute nodes."""
        return [node for page in self._http.pages(NodeList, "/v1/nodes") for node in page.nodes]

    def node(self, name: str) -> Node:
        """One execute node."""
        return self._http.get(Node, f"/v1/nodes/{quote(name, safe='')}")

    def service_info(self) -> ServiceInfo:
        """Versions, limits and choices."""
        return self._http.get(ServiceInfo, "/v1/service-info")

    def health(self) -> Health:
        """Whether the service and those it needs work; does not raise if they do not."""
        return parse(Health, self._http.call("GET", "/healthz", accept=frozenset({503})))


def _job_path(job_id: str) -> str:
    if not job_id.strip() or job_id in {".", ".."}:
        raise NotFound(f"{job_id!r} is not a job")
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _end_of_wait(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _limit_pause(end: float, pause: float) -> float:
    return max(0.0, min(pause, end - time.monotonic()))
