"""A process of an execute node that fetches an image, to be killed or to run out of space.

Arguments: the cache's directory, the API's URL, a node's token, images; mount options of file systems
for caches of their own. It prints a line of JSON for each image: its path and size, or the error and
what remains.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from images.cache.node_cache import ImageCache
from vmjobs.client import ImageClient, Retries
from vmjobs.errors import VMJobsError


def main() -> None:
    """Fetch one image after the other, into each cache."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("url")
    parser.add_argument("token")
    parser.add_argument("images", nargs="+")
    parser.add_argument("--tmpfs", action="append", default=[])
    options = parser.parse_args()
    # A background process of a shell inherits an ignored SIGINT; restore the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fetcher = ImageClient(options.url, options.token, retries=Retries(deadline=120.0))
    for tmpfs in options.tmpfs or [""]:
        if tmpfs:  # over the one before
            mount = ["mount", "-t", "tmpfs", "-o", tmpfs, "tmpfs", options.root]
            subprocess.run(mount, check=True)
        fetch(ImageCache(options.root, fetcher), options.images, options.root)


def fetch(cache: ImageCache, images: Sequence[str], root: Path) -> None:
    """Fetch these images, and print a line about each."""
    for digest in images:
        try:
            with cache.lease(digest) as image:
                said = {"root": str(image.root), "size": image.root.stat().st_size}
        except VMJobsError as error:
            said = {"error": error.code, "message": error.message}
        line = json.dumps({**said, "cached": cache.cached(), "left": left(root)})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def left(root: Path) -> list[str]:
    """All files except complete images and empty files."""
    places = ("partial", "tmp")
    return sorted(str(path.relative_to(root)) for place in places for path in root.glob(f"{place}/*"))


main()
