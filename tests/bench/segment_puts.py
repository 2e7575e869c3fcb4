"""What it costs the repository to take a segment in: checking, storing, and the database's part.

Run with a PostgreSQL URL as argument to measure that one beside SQLite::

    python tests/bench/segment_puts.py [DATABASE_URL]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from images.content import BLOCK, SEGMENT, SEGMENT_BLOCKS, block_digests, segment_digest
from images.segment import pack
from repository.database import Database
from repository.images import Images, Viewer
from repository.images.sql import add_missing, put
from repository.images.tables import BlockRow, SegmentRow
from repository.migrations import upgrade
from repository.objects import open_objects
from vmjobs.config import Config
from vmjobs.model import now

PUTS = 40
#: Blocks that are in the database already: 8 GiB and 128 GiB of them.
SIZES = (0, 131_072, 2_097_152)
ADA = Viewer("ada")


class Timed(Images):
    """Notes how long each transaction of a put took (seconds)."""

    def _record(self, *args, **more):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        try:
            return super()._record(*args, **more)
        finally:
            self.recorded.append(time.perf_counter() - began)

    recorded: list[float] = []  # noqa: RUF012 - of the one that there is


def fill(images: Images, blocks: int) -> None:
    """Have so many blocks in the database, of segments that are not in the store."""
    with images.database.read() as session:
        have = session.query(BlockRow).count()
    for _ in range(0, blocks - have, SEGMENT_BLOCKS * 64):
        with images.database.write() as session:
            for _ in range(64):
                row = {
                    "digest": os.urandom(32),
                    "object": "segments/none",
                    "stored": 1,
                    "size": SEGMENT,
                    "touched": now(),
                    "damaged": False,
                }
                returning = (SegmentRow.id,)
                made = put(
                    session, SegmentRow, row, key=("digest",), change=("touched",), returning=returning
                )
                digests = sorted(os.urandom(32) for _ in range(SEGMENT_BLOCKS))
                rows = [{"digest": d, "segment": made.id, "number": n} for n, d in enumerate(digests)]
                add_missing(session, BlockRow, rows)


def measure(url: str, folder: Path) -> None:
    """Print a line for each size."""
    config = Config(data_dir=folder, database_url=url)
    upgrade(config.database)
    images = Timed(Database(config.database), open_objects(config), config)
    upload = images.open_upload(ADA, 1 << 41).id
    sys.stdout.write(f"{images.database.url.get_backend_name()}\n")
    for size in SIZES:
        fill(images, size)
        takes, images.recorded[:] = [], []
        for _ in range(PUTS):
            data = os.urandom(SEGMENT // 2) + bytes(range(256)) * (SEGMENT // 512)
            digests = block_digests(memoryview(data))
            assert len(digests) == SEGMENT // BLOCK
            body = pack(data, digests)
            began = time.perf_counter()
            images.put_segment(ADA, upload, segment_digest(digests), body)
            takes.append(time.perf_counter() - began)
        whole, recorded = median(takes), median(images.recorded)
        sys.stdout.write(
            f"  {size:>9} blocks before: {whole * 1000:6.1f} ms a segment "
            f"({SEGMENT / 2**20 / whole:.0f} MiB/s of content), statements {recorded * 1000:5.1f} ms, "
            f"slowest put {max(takes) * 1000:.0f} ms\n"
        )
    images.database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        measure("", Path(name) / "sqlite")
        for place in sys.argv[1:]:
            measure(place, Path(name) / "other")
