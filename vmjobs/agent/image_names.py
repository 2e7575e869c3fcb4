"""Names by which jobs requested images, for a node to advertise its cached images."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

#: Remembered names: the most recently used ones.
MAX_NAMES: Final = 200


class ImageNames:
    """Resolves image names to digests and remembers the last ones.

    resolve: returns the digest of an image, from its name; its exceptions pass through.
    """

    def __init__(self, resolve: Callable[[str], str]) -> None:
        self._resolve = resolve
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def resolve(self, name: str) -> str:
        digest = self._resolve(name)
        if name != digest:
            with self._lock:
                self._known.pop(name, None)
                self._known[name] = digest
                while len(self._known) > MAX_NAMES:
                    del self._known[next(iter(self._known))]
        return digest

    def names_of(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return names of images with these digests, latest first; some may be stale."""
        wanted = set(digests)
        with self._lock:
            return tuple(name for name, digest in reversed(self._known.items()) if digest in wanted)
