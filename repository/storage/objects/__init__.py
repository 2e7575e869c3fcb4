"""Object storage in a directory or in S3; objects appear whole or not at all."""

from __future__ import annotations

from repository.storage.objects.base import ORPHAN_SECONDS, ObjectInfo, ObjectReader, ObjectStore
from repository.storage.objects.factory import open_objects

__all__ = ["ORPHAN_SECONDS", "ObjectInfo", "ObjectReader", "ObjectStore", "open_objects"]
