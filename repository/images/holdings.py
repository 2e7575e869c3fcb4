"""Holdings of images in a transaction: locks, names, shares."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from repository.db.sql import upsert
from repository.images.access import holding_of, image_not_found
from repository.images.permissions import LIBRARY, Viewer
from repository.images.tables import HoldingRow, ImageRow, ShareRow, TagRow
from vmjobs.errors import Forbidden
from vmjobs.model import now as utc_now
from vmjobs.wire import Origin, Share, Visibility


def lock_image(session: Session, digest: str) -> None:
    """Keep an image's row from removal until the transaction ends.  Raises NotFound."""
    query = select(ImageRow.digest).where(ImageRow.digest == digest)
    if session.scalars(query.with_for_update(read=True, key_share=True)).one_or_none() is None:
        raise image_not_found(digest)


def pin_image(session: Session, viewer: Viewer, digest: str) -> str:
    """Keep an image until the transaction ends; return its deprecation notice or ``""``.

    Raises NotFound: the image was removed meanwhile.
    """
    lock_image(session, digest)
    holding = holding_of(session, viewer, digest)
    return holding.deprecated if holding else ""


def find_holding(session: Session, viewer: Viewer, digest: str, namespace: str) -> HoldingRow | None:
    """Return the viewer's holding of an image in a namespace, locked for the transaction.

    Raises Forbidden: the namespace was derived from another user's name, and belongs to that user.
    """
    query = select(HoldingRow).where(HoldingRow.image == digest, HoldingRow.namespace == namespace)
    found = session.scalars(query.with_for_update(of=HoldingRow)).one_or_none()
    if found is not None:
        _check_owner(namespace, found.owner, viewer.user)
    return found


def _check_owner(namespace: str, owner: str, user: str) -> None:
    """Check the owner: derived namespaces differ in 32 bits, so users can force collisions."""
    if namespace != LIBRARY and owner != user:
        raise Forbidden(f"the namespace {namespace!r} is another user's")


def add_holding(session: Session, viewer: Viewer, digest: str, namespace: str) -> HoldingRow:
    """Create a holding of an image whose row is locked; the caller checks the quota."""
    row = HoldingRow(
        image=digest,
        namespace=namespace,
        owner=viewer.user,
        visibility=Visibility.PRIVATE.value,
        created=utc_now(),
        expires=None,
        origin=Origin().model_dump(mode="json"),
    )
    session.add(row)
    session.flush()
    return row


def set_tag(session: Session, holding: HoldingRow, name: str, tag: str) -> None:
    """Give a holding a name in its namespace.  Raises Forbidden: see :func:`find_holding`."""
    before = (
        select(HoldingRow.owner)
        .join(TagRow, TagRow.holding == HoldingRow.id)
        .where(TagRow.namespace == holding.namespace, TagRow.name == name, TagRow.tag == tag)
    )
    for owner in session.scalars(before):
        _check_owner(holding.namespace, owner, holding.owner)
    row = {"namespace": holding.namespace, "name": name, "tag": tag, "holding": holding.id}
    upsert(session, TagRow, row, key=("namespace", "name", "tag"), change=("holding",))


def set_shares(session: Session, holding: HoldingRow, shares: Iterable[Share]) -> None:
    """Replace the shares of a holding."""
    session.execute(delete(ShareRow).where(ShareRow.holding == holding.id))
    for kind, name in sorted({(share.kind, share.name) for share in shares}):
        session.add(ShareRow(holding=holding.id, kind=kind, name=name))


def shares_of(session: Session, holding: HoldingRow) -> tuple[Share, ...]:
    """Return the users and groups that share a holding."""
    query = select(ShareRow).where(ShareRow.holding == holding.id)
    rows = session.scalars(query.order_by(ShareRow.kind, ShareRow.name))
    return tuple(Share.model_validate({"kind": row.kind, "name": row.name}) for row in rows)


def expiry(keep_days: int, present: datetime) -> datetime | None:
    """Return when an image expires that is kept for this many days; 0: never."""
    return present + timedelta(days=keep_days) if keep_days else None
