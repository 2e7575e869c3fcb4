"""Benchmark 2: a start from the node's cache, with an image of 10 GiB over one with 1 GiB."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from bench.figures import Finding, compare, in_turns, spread
from bench.start_overhead import empty_job, run_once, step_times
from images.cache.node_cache import ImageCache
from images.content import CHUNK_BYTES, SEGMENT_BYTES
from images.store.image_store import ImageStore
from vmjobs.agent.run.services import RunServices
from vmjobs.errors import Unavailable
from vmjobs.model import HypervisorKind, NetworkMode

#: The target in docs/benchmarks.md.
TARGET = 1.10
SMALL, LARGE = 1024**3, 10 * 1024**3


class _Nowhere:
    """A repository that cannot be reached: every image has to be in the cache."""

    def _gone(self, *_: object) -> NoReturn:
        raise Unavailable("api", "nothing is to be fetched here")

    manifest = signature = layout = segment = segment_range = _gone


def cached_start(
    made: RunServices, store: ImageStore, ref: str, kinds: list[HypervisorKind], pairs: int
) -> Iterator[Finding]:
    """Compare the times from a run's start to a ready guest, on the best working hypervisor."""
    spec = empty_job(ref, kinds[0], NetworkMode.NONE)
    with _images(store, store.resolve(ref)) as (cache, large, small):
        ours = replace(made, images=cache)
        for digest in (large, small):
            run_once(ours, digest, spec)  # fills the cache; not counted
        steps: dict[str, list[float]] = {large: [], small: []}

        def start(digest: str) -> float:
            with step_times() as times:
                seconds = run_once(ours, digest, spec)
            steps[digest] += times.seconds["fetch image"]
            return seconds

        seen = in_turns(pairs, lambda: start(large), lambda: start(small))
    names = {large: "large", small: "small"}
    details = {f"fetch image, {names[digest]}": spread(times) for digest, times in steps.items()}
    what = f"start from the cache, {kinds[0]}, 10 GiB and 1 GiB"
    yield compare(2, what, seen, TARGET, measure="10 GiB / 1 GiB", details=details)


@contextmanager
def _images(store: ImageStore, digest: str) -> Iterator[tuple[ImageCache, str, str]]:
    """Make a cache with two sizes of the image's disk; neither has a segment of only zeros."""
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-images-") as directory:
        own = ImageStore(Path(directory))
        image = store.prepare(digest)
        found = []
        for size in (LARGE, SMALL):
            disk = Path(directory) / "disk"
            _enlarge(image.root, disk, size)
            for part in (image.kernel, image.initrd):
                if part is not None:
                    own.folder.add_file(part)
            parts = {"root": own.folder.add_file(disk)}
            disk.unlink()
            found.append(own.put_manifest(store.manifest(digest).model_copy(update=parts)))
        yield ImageCache(own.root, _Nowhere()), found[0], found[1]


def _enlarge(root: Path, disk: Path, size: int) -> None:
    """Enlarge a root disk behind its file system, with a chunk of noise in every new segment."""
    noise = random.Random(size)
    with root.open("rb") as source, disk.open("wb") as target:
        used = 0
        while piece := source.read(SEGMENT_BYTES):
            target.write(piece)
            used += len(piece)
        for offset in range(-(-used // SEGMENT_BYTES) * SEGMENT_BYTES, size, SEGMENT_BYTES):
            os.pwrite(target.fileno(), noise.randbytes(CHUNK_BYTES), offset)
        target.flush()
        target.truncate(size)
