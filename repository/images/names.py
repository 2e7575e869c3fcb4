"""Names of images: their syntax, and the images that they refer to."""

from __future__ import annotations

from typing import Final

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.images.access import expired_error, is_expired, is_unexpired, may_read
from repository.images.permissions import LIBRARY, Viewer
from repository.images.tables import HoldingRow, TagRow
from vmjobs.errors import InvalidRequest, NotFound
from vmjobs.model import ImageName, ImageRef, Namespace, Tag
from vmjobs.model import now as utc_now

#: Names that an error shows.
MAX_SHOWN: Final = 10
_REF: TypeAdapter[str] = TypeAdapter(ImageRef)
_NAME: TypeAdapter[str] = TypeAdapter(ImageName)
_TAG: TypeAdapter[str] = TypeAdapter(Tag)
_NAMESPACE: TypeAdapter[str] = TypeAdapter(Namespace)


def find_image(session: Session, viewer: Viewer, ref: str) -> tuple[str, HoldingRow | None]:
    """Resolve a reference to a digest, and to a holding if it is a name.

    Raises InvalidRequest (not a reference), NotFound.
    """
    _checked(_REF, ref, "an image reference")
    if ref.startswith("sha256:"):
        return ref, None
    where, _, rest = ref.rpartition("/")
    name, _, tag = rest.partition(":")
    for namespace in [where] if where else [viewer.namespace, LIBRARY]:
        query = (
            select(HoldingRow)
            .join(TagRow, TagRow.holding == HoldingRow.id)
            .where(
                TagRow.namespace == namespace,
                TagRow.name == name,
                TagRow.tag == (tag or "latest"),
                may_read(viewer),
            )
        )
        holding = session.scalars(query).one_or_none()
        if holding is None:
            continue
        if is_expired(holding, utc_now()):
            raise expired_error(holding, ref)
        return holding.image, holding
    known = ", ".join(_some_names(session, viewer)) or "none"
    raise NotFound(f"there is no image {ref[:200]}", hint=f"images that you may name: {known}")


def _some_names(session: Session, viewer: Viewer) -> list[str]:
    query = (
        select(TagRow)
        .join(HoldingRow, HoldingRow.id == TagRow.holding)
        .where(may_read(viewer), is_unexpired(utc_now()))
        .order_by(TagRow.namespace != viewer.namespace, TagRow.namespace, TagRow.name, TagRow.tag)
        .limit(MAX_SHOWN + 1)
    )
    names = [f"{row.namespace}/{row.name}:{row.tag}" for row in session.scalars(query)]
    return names if len(names) <= MAX_SHOWN else [*names[:MAX_SHOWN], "…"]


def check_name(namespace: str, name: str, tag: str) -> None:
    """Check a name's syntax; an empty namespace is the viewer's own.  Raises InvalidRequest."""
    if namespace:
        _checked(_NAMESPACE, namespace, "a namespace")
    _checked(_NAME, name, "an image name")
    _checked(_TAG, tag, "a tag")


def _checked(kind: TypeAdapter[str], value: str, what: str) -> None:
    # A pattern's $ would let a line feed pass at the end.
    try:
        kind.validate_python(value)
    except ValidationError as error:
        raise InvalidRequest(f"{value[:100]!r} is not {what}") from error
    if "\n" in value:
        raise InvalidRequest(f"{value[:100]!r} is not {what}")
