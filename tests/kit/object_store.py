"""Object stores under test, and programs that put objects until they are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repository.storage.objects import ObjectStore, open_objects
from repository.storage.objects.s3 import PART_BYTES
from vmjobs.config import Config

#: More than S3 accepts in one part here; the writer below stops in the middle of it.
LARGE = 3 * PART_BYTES

_WRITER = """
import sys
from pathlib import Path
from repository.storage.objects import open_objects
from vmjobs.config import Config

class Halting:
    left = int(sys.argv[4]) // 2
    def read(self, size):
        if self.left <= 0:
            print("half way", flush=True)
            sys.stdin.read()
        self.left -= size
        return bytes(size)

config = Config(data_dir=Path(sys.argv[1]), storage_url=sys.argv[2])
open_objects(config).put(sys.argv[3], Halting(), int(sys.argv[4]))
"""


class Store:
    def __init__(self, url: str, data_dir: Path) -> None:
        self.url = url
        self.data_dir = data_dir

    def open(self) -> ObjectStore:
        """Open the store, as another process would."""
        return open_objects(Config(data_dir=self.data_dir, storage_url=self.url))

    @contextmanager
    def half_way(self, key: str) -> Iterator[subprocess.Popen[str]]:
        """Run a process that stays in the middle of a put; kills it at the end."""
        command = [sys.executable, "-c", _WRITER, str(self.data_dir), self.url, key, str(LARGE)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "half way\n"
                yield process
            finally:
                process.kill()


def held(objects: ObjectStore) -> list[tuple[str, int]]:
    """Keys and sizes of all objects."""
    return [(o.key, o.size) for o in objects.keys("")]
