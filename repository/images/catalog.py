"""Names and settings of images: changes by the owner, and queries of viewers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, literal, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from images.manifest import ImageManifest
from images.signature import (
    MAX_SIGNATURES,
    check_signature_form,
    find_signers,
    load_trusted_keys,
    require_signed,
)
from repository.db.database import Database
from repository.db.paging import PageRequest, bad_cursor
from repository.db.sql import batches
from repository.db.views import view_of
from repository.images.access import (
    holding_of,
    image_not_found,
    is_unexpired,
    manifest_of,
    may_read,
    may_write,
)
from repository.images.holdings import (
    add_holding,
    expiry,
    find_holding,
    lock_image,
    set_shares,
    set_tag,
    shares_of,
)
from repository.images.names import check_name, find_image
from repository.images.permissions import LIBRARY, Viewer, require_namespace
from repository.images.quota import check_quota
from repository.images.tables import HoldingRow, ImageRow, TagRow
from repository.images.uploads import TRIES
from repository.images.usage import is_needed, is_unheld, refuse_if_needed
from vmjobs.config import Config
from vmjobs.errors import Forbidden, Unavailable
from vmjobs.model import now as utc_now
from vmjobs.wire import ImageChange, ImageDetail, ImageInfo, ImageTag, Origin, Visibility


@dataclass(frozen=True)
class Catalog:
    """Images, their names and settings. Another user's private image is NotFound everywhere."""

    database: Database
    config: Config

    def page(self, viewer: Viewer, page: PageRequest) -> tuple[list[ImageInfo], str]:
        """Return a page of the images that the viewer may use, by name, and the next cursor.

        There is one entry for each tag, and for each untagged image.  Raises InvalidRequest.
        """
        name, tag = func.coalesce(TagRow.name, ""), func.coalesce(TagRow.tag, "")
        order = (HoldingRow.namespace, name, tag, HoldingRow.id)
        query = (
            select(HoldingRow, ImageRow.size, ImageRow.architecture, name, tag)
            .join(ImageRow, ImageRow.digest == HoldingRow.image)
            .outerjoin(TagRow, TagRow.holding == HoldingRow.id)
            .where(may_read(viewer), is_unexpired(utc_now()))
            .order_by(*order)
        )
        if page.cursor:
            query = query.where(tuple_(*order) > _cursor_values(page.cursor))
        with self.database.read() as session:
            rows, cursor = page.cut(session.execute(query.limit(page.rows)).all(), _cursor_of)
        return [_image_info(row) for row in rows], cursor

    def resolve(self, viewer: Viewer, ref: str) -> str:
        """Return the digest of a reference; a bare name is the viewer's own, or the library's.

        Raises InvalidRequest (not a reference), NotFound.
        """
        with self.database.read() as session:
            digest, holding = find_image(session, viewer, ref)
            if holding is None:
                holding_of(session, viewer, digest)
            return digest

    def readable(self, viewer: Viewer, digests: Iterable[str]) -> set[str]:
        """Return those of the images that the viewer may read."""
        wanted = sorted(set(digests))
        if viewer.sees_all:
            return set(wanted)
        found: set[str] = set()
        with self.database.read() as session:
            for some in batches(wanted):
                query = select(HoldingRow.image).where(HoldingRow.image.in_(some))
                found.update(session.scalars(query.where(may_read(viewer), is_unexpired(utc_now()))))
        return found

    def detail(self, viewer: Viewer, ref: str) -> ImageDetail:
        """One image.  Raises InvalidRequest (not a reference), NotFound."""
        with self.database.read() as session:
            digest, holding = find_image(session, viewer, ref)
            return image_detail(session, self.config, viewer, digest, holding)

    def signature(self, viewer: Viewer, digest: str) -> str:
        """All signatures of an image, separated by spaces; empty: none.

        Nodes check them against their own keys before they boot the image. The library's signatures
        come first, so that other users' signatures cannot displace them.
        """
        with self.database.read() as session:
            holding_of(session, viewer, digest)
            query = select(HoldingRow.signature).where(HoldingRow.image == digest)
            found = session.scalars(query.order_by(HoldingRow.namespace != LIBRARY, HoldingRow.id))
            words = dict.fromkeys(word for text in found for word in text.split())
            return " ".join(list(words)[:MAX_SIGNATURES])

    def manifest(self, viewer: Viewer, digest: str) -> bytes:
        """Return an image's manifest: exactly the bytes of its digest."""
        with self.database.read() as session:
            holding_of(session, viewer, digest)
            data = manifest_of(session, digest)
        if not data:
            raise image_not_found(digest)
        ImageManifest.parse(data, digest)  # raises DigestMismatch: the database is damaged
        return data

    def visibility(self, viewer: Viewer, digest: str) -> Visibility:
        """Return the image's visibility: PUBLIC if any of its holdings is public."""
        query = select(HoldingRow.id).where(
            HoldingRow.image == digest,
            HoldingRow.visibility == Visibility.PUBLIC.value,
            is_unexpired(utc_now()),
        )
        with self.database.read() as session:
            holding_of(session, viewer, digest)
            found = session.scalars(query.limit(1)).one_or_none()
        return Visibility.PRIVATE if found is None else Visibility.PUBLIC

    def parsed_manifest(self, viewer: Viewer, digest: str) -> ImageManifest:
        return ImageManifest.parse(self.manifest(viewer, digest), digest)

    # -- changes by owners

    def change(self, viewer: Viewer, digest: str, change: ImageChange) -> ImageDetail:
        """Change an image's settings.

        Raises NotFound; Forbidden (it is not the viewer's); ImageRejected (signature).
        """
        with self.database.write() as session:
            lock_image(session, digest)
            holding = self._own(session, viewer, digest)
            if change.visibility is not None:
                holding.visibility = change.visibility.value
            if change.shares is not None:
                set_shares(session, holding, change.shares)
            if change.deprecated is not None:
                holding.deprecated = change.deprecated
            if change.keep_days is not None:
                holding.expires = expiry(change.keep_days, utc_now())
            if change.signature is not None:
                check_signature(self.config, digest, change.signature)
                holding.signature = change.signature
            session.flush()
            return image_detail(session, self.config, viewer, digest, holding)

    def tag(self, viewer: Viewer, namespace: str, name: str, tag: str, digest: str) -> None:
        """Give an image a name, which another image may lose.

        Raises InvalidRequest (not a name), Forbidden (not the viewer's namespace), NotFound,
        QuotaExceeded: a name for another user's image creates a holding of the viewer.
        """
        check_name(namespace, name, tag)
        namespace = require_namespace(viewer, namespace)
        for _ in range(TRIES):
            try:
                return self._tag(viewer, namespace, name, tag, digest)
            except IntegrityError:  # two first names at the same moment
                continue
        raise Unavailable("database", "the image is named or removed elsewhere: try again")

    def _tag(self, viewer: Viewer, namespace: str, name: str, tag: str, digest: str) -> None:
        with self.database.write() as session:
            lock_image(session, digest)
            found = holding_of(session, viewer, digest)
            holding = find_holding(session, viewer, digest, namespace)
            holding = holding or add_holding(session, viewer, digest, namespace)
            if found is not None and found.id != holding.id and not holding.signature:
                holding.signature = found.signature
            set_tag(session, holding, name, tag)
            session.flush()
            if namespace != LIBRARY:
                check_quota(session, self.config, viewer.user)

    def untag(self, viewer: Viewer, namespace: str, name: str, tag: str) -> None:
        """Remove a name; the image stays.  Raises InvalidRequest, Forbidden, NotFound."""
        check_name(namespace, name, tag)
        namespace = require_namespace(viewer, namespace)
        which = (TagRow.namespace == namespace, TagRow.name == name, TagRow.tag == tag)
        with self.database.write() as session:
            mine = TagRow.holding.in_(select(HoldingRow.id).where(may_write(viewer)))
            if not session.execute(delete(TagRow).where(*which, mine).returning(TagRow.name)).all():
                raise image_not_found(f"{namespace}/{name}:{tag}")

    def remove(self, viewer: Viewer, digest: str) -> None:
        """Remove the viewer's holding of an image, with its names; unreferenced bytes go later.

        An administrator without an own holding removes the library's, or else all holdings.
        Raises NotFound; Forbidden (it is not the viewer's); ImageInUse (it names the jobs).
        """
        with self.database.write() as session:
            image = select(ImageRow.digest).where(ImageRow.digest == digest)
            if session.scalars(image.with_for_update()).one_or_none() is None:
                raise image_not_found(digest)
            holdings = self._removable(session, viewer, digest)
            for holding in holdings:
                refuse_if_needed(session, holding, viewer)
                session.execute(delete(HoldingRow).where(HoldingRow.id == holding.id))
            session.execute(
                delete(ImageRow).where(ImageRow.digest == digest, is_unheld(), ~is_needed())
            )

    def _removable(self, session: Session, viewer: Viewer, digest: str) -> list[HoldingRow]:
        query = select(HoldingRow).where(HoldingRow.image == digest)
        own = session.scalars(query.where(may_write(viewer)).order_by(HoldingRow.namespace == LIBRARY))
        found = own.first()
        if found is not None:
            return [found]
        if viewer.admin and viewer.image is None:
            return list(session.scalars(query))
        return [self._own(session, viewer, digest)]

    def _own(self, session: Session, viewer: Viewer, digest: str) -> HoldingRow:
        """Lock the viewer's holding, or the library's for an administrator, for a change."""
        query = (
            select(HoldingRow)
            .where(HoldingRow.image == digest, may_write(viewer))
            .order_by(HoldingRow.namespace == LIBRARY)
            .with_for_update(of=HoldingRow)
        )
        found = session.scalars(query).first()
        if found is None:
            holding_of(session, viewer, digest)
            raise Forbidden(f"the image {digest} is not yours to change")
        return found


def image_detail(
    session: Session, config: Config, viewer: Viewer, digest: str, holding: HoldingRow | None
) -> ImageDetail:
    """Return an image as the viewer sees it. holding: of the viewer, if it is known.

    Raises NotFound.
    """
    holding = holding or holding_of(session, viewer, digest)
    image = session.get(ImageRow, digest)
    if image is None:
        raise image_not_found(digest)
    data = manifest_of(session, digest)
    ImageManifest.parse(data, digest)
    mine = holding is not None and (viewer.sees_all or holding.owner == viewer.user)
    return ImageDetail(
        digest=digest,
        owner=_owner_name(holding) if holding else "",
        visibility=Visibility(holding.visibility) if holding else Visibility.PRIVATE,
        shares=shares_of(session, holding) if holding and mine else (),
        tags=_tags(session, viewer, digest),
        created=holding.created if holding else image.created,
        expires=holding.expires if holding else None,
        deprecated=holding.deprecated if holding else "",
        origin=Origin.model_validate(holding.origin) if holding else Origin(),
        signers=_signers(config, digest, holding.signature if holding else ""),
        size=image.size,
        stored=image.stored,
        manifest=json.loads(data),
    )


def _signers(config: Config, digest: str, signature: str) -> tuple[str, ...]:
    if config.image_trust_dir is None or not signature:
        return ()
    return find_signers(digest, signature, load_trusted_keys(config.image_trust_dir))


def check_signature(config: Config, digest: str, signature: str) -> None:
    """Check a signature.  Raises InvalidRequest (malformed); ImageRejected (not trusted)."""
    check_signature_form(signature)
    if config.image_trust_dir is not None:
        require_signed(digest, signature, load_trusted_keys(config.image_trust_dir))


def _image_info(row: Any) -> ImageInfo:
    holding, size, architecture, name, tag = row
    return ImageInfo(
        namespace=holding.namespace,
        name=name,
        tag=tag,
        digest=holding.image,
        size=size,
        architecture=architecture,
        owner=_owner_name(holding),
        visibility=Visibility(holding.visibility),
        created=holding.created,
        deprecated=holding.deprecated,
    )


def _cursor_of(row: Any) -> str:
    """Return the cursor after a row; its namespace comes last, as it may contain colons."""
    return f"{row[0].id}:{row[3]}:{row[4]}:{row[0].namespace}"


def _cursor_values(cursor: str) -> Any:
    try:
        holding, name, tag, namespace = cursor.split(":", 3)
        return tuple_(literal(namespace), literal(name), literal(tag), literal(int(holding[:18])))
    except ValueError:
        raise bad_cursor() from None


def _tags(session: Session, viewer: Viewer, digest: str) -> tuple[ImageTag, ...]:
    query = (
        select(TagRow)
        .join(HoldingRow, HoldingRow.id == TagRow.holding)
        .where(HoldingRow.image == digest, may_read(viewer), is_unexpired(utc_now()))
        .order_by(TagRow.namespace, TagRow.name, TagRow.tag)
    )
    return tuple(view_of(ImageTag, row) for row in session.scalars(query))


def _owner_name(holding: HoldingRow) -> str:
    return LIBRARY if holding.namespace == LIBRARY else holding.owner
