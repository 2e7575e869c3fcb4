"""The identity on whose behalf a request is made, and its namespaces."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from vmjobs.errors import Forbidden

#: The service's own namespace; administrators write to it.
LIBRARY: Final = "library"
_PLAIN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: The suffix of a derived namespace. A user name with such a suffix is not used unchanged.
_DERIVED_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}\Z")
_INVALID_CHARACTERS: Final = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True)
class Viewer:
    """The identity on whose behalf a request is made.

    groups: from the token. admin: sees every image, and writes to the library.
    node: an execute node, which reads every image. image: the only image that a job's token can read.
    job: the job of that token.
    """

    user: str
    groups: frozenset[str] = frozenset()
    admin: bool = False
    node: bool = False
    image: str | None = None
    job: str = ""

    @property
    def namespace(self) -> str:
        """The user's own namespace."""
        return namespace_of(self.user)

    @property
    def sees_all(self) -> bool:
        """Whether the viewer may read every image."""
        return (self.admin or self.node) and self.image is None


def namespace_of(user: str) -> str:
    """Return the namespace of a user: the user name if it is valid, else one derived from it."""
    if _PLAIN.fullmatch(user) and user != LIBRARY and not _DERIVED_SUFFIX.search(user):
        return user
    slug = _INVALID_CHARACTERS.sub("-", user.lower()).strip("._-")[:48].rstrip("._-") or "user"
    return f"{slug}-{hashlib.sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def require_namespace(viewer: Viewer, namespace: str) -> str:
    """Return the namespace to write to: the one requested, or the viewer's own.

    Raises Forbidden if it is another user's.
    """
    own = viewer.namespace
    if namespace in {"", own}:
        return own
    if namespace == LIBRARY and viewer.admin:
        return namespace
    who = "administrators'" if namespace == LIBRARY else "not yours"
    raise Forbidden(
        f"names in {namespace[:64]!r} are {who} to give", hint=f"your own namespace is {own!r}"
    )
