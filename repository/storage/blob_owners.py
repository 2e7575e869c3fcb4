"""Owners of blobs: a digest alone gives no right to the bytes.

Equal bytes are stored once for all owners, but each owner has to send them, or to have them from an own
job. The owner's row is inserted before the object is stored, and an object is removed only if no row
names it, under the lock that new rows take: so no new row can name a removed object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import BinaryIO, Final

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.orm import Session

from repository.db.database import Database
from repository.db.models import BlobOwnerRow
from repository.db.sql import batches, take_transaction_lock, upsert
from repository.images.quota import check_quota
from repository.storage.blobs import BlobStore, key_of
from repository.storage.objects import ORPHAN_SECONDS, ObjectInfo
from vmjobs.config import Config
from vmjobs.model import MIB
from vmjobs.model import now as utc_now

#: Objects that are looked up at once.
LIST_BATCH: Final = 1000
#: A use of a blob updates its ``touched`` time only after this fraction (1/10) of its retention time.
TOUCH_FRACTION: Final = 10


@dataclass(frozen=True)
class BlobOwners:
    """Blobs, each of which belongs to the owners who have it."""

    database: Database
    blobs: BlobStore
    config: Config
    orphan_seconds: float = ORPHAN_SECONDS

    def put(self, owner: str, digest: str, source: BinaryIO) -> bool:
        """Store a blob; return whether it is new to its owner, regardless of other owners.

        Raises:
            DigestMismatch: the bytes do not have that digest; nothing is stored.
            InvalidRequest: ``digest`` is not a digest.
            PayloadTooLarge: more than ``max_input_size`` MiB, or than a job's largest disk.
            QuotaExceeded: beyond the owner's quota.
        """
        new = not self.has(owner, digest)
        limit = min(self.config.max_input_size, self.config.max_disk) * MIB
        self.blobs.put(
            source,
            digest=digest,
            limit=limit,
            admit=lambda found, size: self.add(owner, found, size, limited=True),
        )
        return new

    def has(self, owner: str, digest: str) -> bool:
        """Whether the owner has the blob; the call extends its retention.

        Raises InvalidRequest if ``digest`` is not a digest.
        """
        if self.size(owner, digest) is None:
            return False
        patience = timedelta(seconds=self.config.upload_seconds)
        mine = (BlobOwnerRow.owner == owner, BlobOwnerRow.digest == digest)
        with self.database.read() as session:
            touched = session.scalars(select(BlobOwnerRow.touched).where(*mine)).one_or_none()
        if touched is None or utc_now() - touched <= patience / TOUCH_FRACTION:
            return touched is not None
        touch = update(BlobOwnerRow).where(*mine).values(touched=utc_now())
        with self.database.write() as session:  # it may have been collected meanwhile
            return session.scalars(touch.returning(BlobOwnerRow.digest)).one_or_none() is not None

    def size(self, owner: str, digest: str) -> int | None:
        """Return the size of a blob in bytes; ``None`` if the owner does not have it.

        Raises InvalidRequest if ``digest`` is not a digest.
        """
        key_of(digest)
        with self.database.read() as session:
            if session.get(BlobOwnerRow, (owner, digest)) is None:
                return None
        return self.blobs.size(digest)

    def add(self, owner: str, digest: str, size: int, *, limited: bool) -> None:
        """Record the owner of a blob that is about to be stored.

        limited: check the quota.  Raises QuotaExceeded.
        """
        values = {"owner": owner, "digest": digest, "size": size, "used": False, "touched": utc_now()}
        with self.database.write() as session:
            _lock(session, digest)
            if limited and session.get(BlobOwnerRow, (owner, digest)) is None:
                check_quota(session, self.config, owner, size)
            upsert(session, BlobOwnerRow, values, key=("owner", "digest"), change=("touched",))

    def collect(self, dry_run: bool = False) -> list[ObjectInfo]:
        """Remove blobs that no job uses and no owner has used lately; return their objects.

        dry_run: remove nothing, return what would be removed.
        """
        before = utc_now() - timedelta(seconds=self.config.upload_seconds)
        if not dry_run:
            with self.database.write() as session:
                session.execute(delete(BlobOwnerRow).where(~_is_needed(before)))
        return [
            info for digest, info in self._unowned(before) if dry_run or self._remove_unowned(digest)
        ]

    def _unowned(self, before: datetime) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield old blobs that no owner has used, or touched since ``before``."""
        oldest = utc_now() - timedelta(seconds=self.orphan_seconds)
        old = (found for found in self.blobs.stored() if found[1].modified < oldest)
        for some in batches(old, LIST_BATCH):
            query = select(BlobOwnerRow.digest).where(
                BlobOwnerRow.digest.in_([digest for digest, _ in some]), _is_needed(before)
            )
            with self.database.read() as session:
                owned = set(session.scalars(query))
            yield from (found for found in some if found[0] not in owned)

    def _remove_unowned(self, digest: str) -> bool:
        owners = select(func.count()).where(BlobOwnerRow.digest == digest)
        with self.database.write() as session:
            _lock(session, digest)
            if session.scalar(owners):
                return False
            self.blobs.delete(digest)
            return True


def mark_blobs_used(session: Session, owner: str, digests: Collection[str]) -> set[str]:
    """Mark blobs as used by the owner's job, so that they stay; return those he lacks."""
    mine = (BlobOwnerRow.owner == owner, BlobOwnerRow.digest.in_(sorted(digests)))
    change = update(BlobOwnerRow).where(*mine).values(used=True, touched=utc_now())
    return set(digests) - set(session.scalars(change.returning(BlobOwnerRow.digest)))


def _is_needed(before: datetime) -> ColumnElement[bool]:
    return or_(BlobOwnerRow.used, BlobOwnerRow.touched >= before)


def _lock(session: Session, digest: str) -> None:
    take_transaction_lock(session, f"blob {digest}")
