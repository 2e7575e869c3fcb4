"""Object storage in a directory or in S3; objects appear whole or not at all."""

from __future__ import annotations

from repository.storage.objects.base import ORPHAN_SECONDS, ObjectInfo, ObjectReader, ObjectStore
from repository.storage.objects.local import LocalObjects
from vmjobs.config import Config
from vmjobs.errors import ConfigError, Fault
from vmjobs.storage_url import S3Location, parse_storage_url

__all__ = ["ORPHAN_SECONDS", "ObjectInfo", "ObjectReader", "ObjectStore", "open_objects"]


def open_objects(config: Config) -> ObjectStore:
    """Create the object store that ``config`` names, without contacting it yet, see ``check``.

    Raises ConfigError.
    """
    try:
        location = parse_storage_url(config.storage_url)
    except ValueError as error:
        faults = [Fault("storage_url", "value_error", str(error))]
        raise ConfigError(f"storage_url {error}", faults=faults) from error
    if isinstance(location, S3Location):
        # boto3 is slow to import, and only services with S3 need it.
        from repository.storage.objects.s3 import S3Objects  # noqa: PLC0415

        return S3Objects(location)
    return LocalObjects(location or config.data_dir / "objects")
