"""A process that uses images of a small cache over and over, and sees that they stay while it does.

Arguments: the cache's directory, a store to fetch from, the cache's limit in bytes, a seed, rounds,
images. Prints how often an image was used and how often there was no room for one.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from images.cache.node_cache import ImageCache
from images.store.image_store import ImageStore
from tests.kit.image_cache import Remote
from tests.kit.segments import compute_layout_of_bytes
from vmjobs.errors import StorageFull


def main() -> None:
    """Lease images at random; two at once now and then."""
    root, store, limit, seed, rounds, *images = sys.argv[1:]
    cache = ImageCache(Path(root), Remote(ImageStore(Path(store))), limit=int(limit))
    chance = random.Random(seed)
    used = refused = 0
    for _ in range(int(rounds)):
        digest = chance.choice(images)
        try:
            with cache.lease(digest) as image:
                if chance.random() < 0.5:
                    cache.prepare(chance.choice(images))  # may evict anything but what is leased
                data = image.root.read_bytes()
                manifest = ImageStore(Path(store)).manifest(digest)
                if compute_layout_of_bytes(data).digest != manifest.root.digest:
                    sys.exit(f"{digest} has other bytes than it should")
            used += 1
        except StorageFull:
            refused += 1
    sys.stdout.write(f"{used} {refused}\n")


main()
