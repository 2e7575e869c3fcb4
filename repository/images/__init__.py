"""Images in the repository: segments in an object store, everything else in the database."""

from __future__ import annotations

from repository.images.permissions import LIBRARY, Viewer, namespace_of

__all__ = ["LIBRARY", "Viewer", "namespace_of"]
