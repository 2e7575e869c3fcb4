"""What jobs have called the images that are here, so that the node can say that it has what the next
job asks for by a name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

#: Names that are remembered, the last ones that were used.
MAX_NAMES: Final = 200


class SpokenNames:
    """Passes names on to what knows their digests, and remembers both. A digest is no name.

    resolve: the digest of an image, from its name; what it raises is raised.
    """

    def __init__(self, resolve: Callable[[str], str]) -> None:
        self._resolve = resolve
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def resolve(self, name: str) -> str:
        """The digest of an image, from its name."""
        digest = self._resolve(name)
        if name != digest:
            with self._lock:
                self._known.pop(name, None)
                self._known[name] = digest
                while len(self._known) > MAX_NAMES:
                    del self._known[next(iter(self._known))]
        return digest

    def of(self, digests: Iterable[str]) -> tuple[str, ...]:
        """What images with these digests were called, the last name first; some may mean others now."""
        wanted = set(digests)
        with self._lock:
            return tuple(name for name, digest in reversed(self._known.items()) if digest in wanted)
