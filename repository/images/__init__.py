"""Images in the repository: segments in an object store, everything else in the database."""

from __future__ import annotations

from repository.images.service import Images
from repository.images.viewer import LIBRARY, Viewer, namespace_of

__all__ = ["LIBRARY", "Images", "Viewer", "namespace_of"]
