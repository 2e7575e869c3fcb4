"""From the setting ``storage_url`` to the object store that it names."""

from __future__ import annotations

from repository.objects.base import ObjectStore
from repository.objects.local import LocalObjects
from vmjobs.config import Config


def open_objects(config: Config) -> ObjectStore:
    """The object store that ``config`` names; nothing is opened or asked yet."""
    return LocalObjects(config.data_dir / "objects")
