"""Processes that push, name, run, remove and collect images at once, on one repository."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, digest_chunks
from images.manifest import ImageManifest, Part
from repository.images import Viewer
from repository.service import Repository, open_repository
from tests.kit.noise import noise
from tests.kit.repository_images import pieces, sweeper
from tests.kit.repository_jobs import images_of, submission
from tests.kit.segments import compute_layout_of_bytes, encode_segment
from vmjobs.config import Config
from vmjobs.errors import Forbidden, ImageInUse, InvalidSpec, MissingChunks, NotFound, VMJobsError
from vmjobs.wire import Publication, Visibility

USERS: Final = ("ada", "bob", "eve")
DISKS: Final = 10
THREADS: Final = 2
#: Uploads idle for this many seconds expire; unreferenced data is removed at once.
PATIENCE: Final = 0.3
#: Seconds after which objects without a row are removed.
ORPHANS: Final = 120.0
DEADLINE: Final = 120
#: Index of the board's stop flag; before it, each process counts its actions.
STOP: Final = -1


@cache
def disk(seed: int) -> bytes:
    """One of a few disks that share chunks and segments: few bytes, and many zeros."""
    begin = noise(3 * CHUNK_BYTES, seed % 3) + noise(CHUNK_BYTES, seed)
    middle = noise(2 * CHUNK_BYTES, 100 + seed % 2)
    return (
        begin
        + bytes(SEGMENT_BYTES - len(begin))
        + middle
        + bytes(SEGMENT_BYTES - len(middle))
        + noise(99, seed)
    )


@cache
def layout_of(seed: int) -> ContentLayout:
    return compute_layout_of_bytes(disk(seed))


@cache
def segments_of(seed: int) -> dict[bytes, bytes]:
    return dict(pieces(disk(seed)))


@cache
def manifest(seed: int) -> ImageManifest:
    layout = layout_of(seed)
    return ImageManifest(root=Part(digest=layout.digest, size=layout.size))


class Worker:
    """One thread's random actions, which may conflict with those of other threads."""

    def __init__(self, repository: Repository, seed: int) -> None:
        self.repository = repository
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.jobs: list[str] = []

    def step(self) -> None:
        """Take one action; a conflict with a faster thread is no error."""
        others = [self.give_up, self.rename, self.remove, self.remove, self.remove, self.run, self.end]
        action = self.random.choice([self.push, self.push, *others])
        viewer = Viewer(self.random.choice(USERS))
        try:
            action(viewer)
            self.done[action.__name__] += 1
        except (NotFound, Forbidden, MissingChunks, ImageInUse, InvalidSpec) as error:
            self.done[f"{action.__name__}: {error.code}"] += 1

    def push(self, viewer: Viewer) -> None:
        """Upload a disk as a client does, and make an image of it."""
        seed = self.random.randrange(DISKS)
        upload = self._send(viewer, seed)
        wish = Publication(
            manifest=manifest(seed).model_dump(mode="json", by_alias=True),
            upload=upload,
            name=self._name(),
            visibility=self.random.choice([Visibility.PUBLIC, Visibility.PRIVATE]),
        )
        self.repository.publisher.publish(viewer, wish)

    def give_up(self, viewer: Viewer) -> None:
        """Upload a disk, and abandon the upload."""
        upload = self._send(viewer, self.random.randrange(DISKS))
        if self.random.random() < 0.5:
            self.repository.uploads.drop(viewer, upload)

    def rename(self, viewer: Viewer) -> None:
        """Move a name, or remove one."""
        own = [image for image in images_of(self.repository, viewer) if image.owner == viewer.user]
        if own and self.random.random() < 0.8:
            self.repository.catalog.tag(
                viewer, "", self._name(), "latest", self.random.choice(own).digest
            )
        else:
            self.repository.catalog.untag(viewer, "", self._name(), "latest")

    def remove(self, viewer: Viewer) -> None:
        own = [image for image in images_of(self.repository, viewer) if image.owner == viewer.user]
        if own:
            self.repository.catalog.remove(viewer, self.random.choice(own).digest)

    def run(self, viewer: Viewer) -> None:
        seen = [image for image in images_of(self.repository, viewer) if image.namespace != "library"]
        if seen:
            spec = submission(image=self.random.choice(seen).digest)
            self.jobs.append(self.repository.submissions.submit(viewer.user, spec).jobs[0].id)

    def end(self, viewer: Viewer) -> None:
        """End all of this thread's jobs."""
        del viewer
        while self.jobs:
            self.repository.job_actions.cancel(self.jobs.pop())

    def _send(self, viewer: Viewer, seed: int) -> str:
        layout, wanted = layout_of(seed), segments_of(seed)
        upload = self.repository.uploads.begin(viewer, layout.size).id
        answers = self.repository.uploads.missing_segments(viewer, upload, list(wanted))
        for (digest, piece), missing in zip(wanted.items(), answers, strict=True):
            if missing:
                self._put(viewer, upload, digest, piece)
        self.repository.uploads.put_content(viewer, upload, layout.digest, layout.to_bytes())
        return upload

    def _put(self, viewer: Viewer, upload: str, digest: bytes, piece: bytes) -> None:
        blocks = digest_chunks(memoryview(piece))
        missing = self.repository.uploads.missing_chunks(viewer, upload, blocks)
        here = [number for number, is_missing in enumerate(missing) if not is_missing]
        try:
            self.repository.segments.put(viewer, upload, digest, encode_segment(piece, blocks, here))
        except MissingChunks:
            self.done["blocks went"] += 1
            self.repository.segments.put(viewer, upload, digest, encode_segment(piece, blocks))

    def _name(self) -> str:
        return self.random.choice("abc")


def work(config: Config, seed: int, start: Any, board: Any, results: Any) -> None:
    """Run a process of several threads."""
    repository = open_repository(config, migrate=False)
    for number in range(DISKS):
        segments_of(number)
    counting = threading.Lock()
    start.wait(DEADLINE)

    def loop(number: int) -> Counter[str]:
        worker = Worker(repository, number)
        while not board[STOP]:
            worker.step()
            with counting:
                board[seed] += 1
        return worker.done

    with ThreadPoolExecutor(THREADS) as pool:
        done = sum(pool.map(loop, range(seed * THREADS, (seed + 1) * THREADS)), Counter())
    results.put(done)
    repository.close()


def collect(config: Config, seed: int, start: Any, board: Any, results: Any) -> None:
    """Run a process that collects garbage without a pause."""
    del seed
    repository = open_repository(config, migrate=False)
    images = sweeper(repository, PATIENCE, ORPHANS)
    done: Counter[str] = Counter()
    start.wait(DEADLINE)
    while not board[STOP]:
        report = images.garbage_collector.collect()
        done += Counter(
            {f"collected {k}": v for k, v in report.model_dump().items()} | {"collections": 1}
        )
        images.garbage_collector.collect(dry_run=True)
    results.put(done)
    repository.close()


def load(config: Config, count: int) -> Counter[str]:
    """Run all processes until ``count`` actions are done, and kill one of them in the middle.

    Returns the actions done. Raises VMJobsError: a process reported an error.
    """
    context: SpawnContext = multiprocessing.get_context("spawn")
    targets: list[Callable[..., None]] = [work, work, work, collect, collect]
    results = context.Queue()
    # Without a lock, because a killed process would never release it.
    board = context.RawArray("i", len(targets) + 1)
    start = context.Barrier(len(targets) + 1)
    patient = config.model_copy(update={"upload_seconds": PATIENCE})
    processes: list[BaseProcess] = [
        context.Process(target=target, args=(patient, number, start, board, results))
        for number, target in enumerate(targets)
    ]
    for process in processes:
        process.start()
    try:
        start.wait(DEADLINE)
        _wait_for(board, count // 2, processes)
        processes[0].kill()
        _wait_for(board, count, processes[1:])
        board[STOP] = 1
        return sum((_result(processes, results) for _ in targets[1:]), Counter())
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _wait_for(board: Any, count: int, processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + DEADLINE
    while sum(board) < count and time.monotonic() < deadline:
        if multiprocessing.connection.wait([process.sentinel for process in processes], 0.05):
            raise VMJobsError("a process ended before it was told to")


def _result(processes: list[BaseProcess], results: Any) -> Counter[str]:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            found: Counter[str] = results.get(timeout=1)
        except queue.Empty:
            codes = [process.exitcode for process in processes[1:]]
            if any(codes):
                raise VMJobsError(f"a process failed: {codes}") from None
        else:
            return found
    raise VMJobsError("a process does not end")
