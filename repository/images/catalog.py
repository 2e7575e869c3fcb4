"""Names and terms of images: what the owner decides, and what a viewer is shown of it."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import delete, func, literal, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from images.signature import MAX_SIGNATURES, check_form, require_signed, signers, trusted_keys
from repository.images.access import (
    alive,
    holding_of,
    manifest_of,
    may_read,
    may_write,
    missing,
    parsed,
)
from repository.images.names import check_name, find
from repository.images.reading import Reading
from repository.images.sql import batches, put
from repository.images.tables import HoldingRow, ImageRow, ShareRow, TagRow
from repository.images.uploads import TRIES
from repository.images.usage import needed, refuse_if_needed, unheld
from repository.images.viewer import LIBRARY, Viewer, require_namespace
from repository.paging import Window, all_pages, bad_cursor
from vmjobs.errors import Forbidden, Unavailable
from vmjobs.model import HypervisorKind
from vmjobs.model import now as utc_now
from vmjobs.wire import ImageChange, ImageDetail, ImageInfo, ImageTag, Origin, Share, Visibility


class Catalog(Reading):
    """The part that knows names. Somebody else's private image is NotFound everywhere."""

    def list(self, viewer: Viewer) -> builtins.list[ImageInfo]:
        """The images that the viewer may name, by name; one entry for each tag, or for none."""
        return all_pages(partial(self.page, viewer))

    def page(self, viewer: Viewer, page: Window) -> tuple[builtins.list[ImageInfo], str]:
        """A part of :meth:`list`, and the cursor of the next one.  Raises InvalidRequest: no cursor."""
        name, tag = func.coalesce(TagRow.name, ""), func.coalesce(TagRow.tag, "")
        order = (HoldingRow.namespace, name, tag, HoldingRow.id)
        query = (
            select(HoldingRow, ImageRow.size, ImageRow.architecture, name, tag)
            .join(ImageRow, ImageRow.digest == HoldingRow.image)
            .outerjoin(TagRow, TagRow.holding == HoldingRow.id)
            .where(may_read(viewer), alive(utc_now()))
            .order_by(*order)
        )
        if page.cursor:
            query = query.where(tuple_(*order) > _after(page.cursor))
        with self.database.read() as session:
            rows, cursor = page.cut(session.execute(query.limit(page.rows)).all(), _cursor_of)
        return [_entry(row) for row in rows], cursor

    def resolve(self, viewer: Viewer, ref: str) -> str:
        """The digest that a reference stands for; a bare name is the viewer's own, or the library's.

        Raises InvalidRequest (not a reference), NotFound.
        """
        with self.database.read() as session:
            digest, holding = find(session, viewer, ref)
            if holding is None:
                holding_of(session, viewer, digest)
            return digest

    def readable(self, viewer: Viewer, digests: Iterable[str]) -> set[str]:
        """Those of the images that the viewer may read."""
        wanted = sorted(set(digests))
        if viewer.sees_all:
            return set(wanted)
        found: set[str] = set()
        with self.database.read() as session:
            for some in batches(wanted):
                query = select(HoldingRow.image).where(HoldingRow.image.in_(some))
                found.update(session.scalars(query.where(may_read(viewer), alive(utc_now()))))
        return found

    def detail(self, viewer: Viewer, ref: str) -> ImageDetail:
        """One image.  Raises InvalidRequest (not a reference), NotFound."""
        with self.database.read() as session:
            digest, holding = find(session, viewer, ref)
            return self._detail(session, viewer, digest, holding)

    def signature(self, viewer: Viewer, digest: str) -> str:
        """All signatures that were given for an image, with spaces between; empty: none.

        Whoever boots the image checks them against keys of his own. The library's come first, so
        that nobody can push a good one out of sight.
        """
        with self.database.read() as session:
            holding_of(session, viewer, digest)
            query = select(HoldingRow.signature).where(HoldingRow.image == digest)
            found = session.scalars(query.order_by(HoldingRow.namespace != LIBRARY, HoldingRow.id))
            words = dict.fromkeys(word for text in found for word in text.split())
            return " ".join(list(words)[:MAX_SIGNATURES])

    def kinds(self, viewer: Viewer, digest: str) -> tuple[HypervisorKind, ...]:
        """What can boot an image, best first."""
        return self.parsed_manifest(viewer, digest).hypervisors

    def renews(self, viewer: Viewer, digest: str) -> bool:
        """Whether an image's guest goes on with another token where its machine was saved."""
        return self.parsed_manifest(viewer, digest).renews

    def pin(self, session: Session, viewer: Viewer, digest: str) -> str:
        """Within the transaction that stores a job: the image stays. Why not to use it, or ``""``.

        Raises NotFound: it went meanwhile.
        """
        query = select(ImageRow.digest).where(ImageRow.digest == digest)
        if session.scalars(query.with_for_update(read=True, key_share=True)).one_or_none() is None:
            raise missing(digest)
        holding = holding_of(session, viewer, digest)
        return holding.deprecated if holding else ""

    # -- what owners decide

    def change(self, viewer: Viewer, digest: str, change: ImageChange) -> ImageDetail:
        """Change an image's terms.

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
                holding.expires = until(change.keep_days, utc_now())
            if change.signature is not None:
                self.check_signature(digest, change.signature)
                holding.signature = change.signature
            session.flush()
            return self._detail(session, viewer, digest, holding)

    def tag(self, viewer: Viewer, namespace: str, name: str, tag: str, digest: str) -> None:
        """Call an image by a name, and nothing else by it any more.

        Raises InvalidRequest (not a name), Forbidden (not the viewer's namespace), NotFound,
        QuotaExceeded: who names an image of others in his own namespace holds it, too.
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
            holding = held(session, viewer, digest, namespace)
            holding = holding or hold(session, viewer, digest, namespace)
            if found is not None and found.id != holding.id and not holding.signature:
                holding.signature = found.signature
            set_tag(session, holding, name, tag)
            session.flush()
            if namespace != LIBRARY:
                self.check_quota(session, viewer.user)

    def untag(self, viewer: Viewer, namespace: str, name: str, tag: str) -> None:
        """Take a name away; the image stays.  Raises InvalidRequest, Forbidden, NotFound."""
        check_name(namespace, name, tag)
        namespace = require_namespace(viewer, namespace)
        which = (TagRow.namespace == namespace, TagRow.name == name, TagRow.tag == tag)
        with self.database.write() as session:
            mine = TagRow.holding.in_(select(HoldingRow.id).where(may_write(viewer)))
            if not session.execute(delete(TagRow).where(*which, mine).returning(TagRow.name)).all():
                raise missing(f"{namespace}/{name}:{tag}")

    def remove(self, viewer: Viewer, digest: str) -> None:
        """Let go of an image, with all its names; its bytes go when nobody else holds them.

        An administrator who does not hold it himself takes it out of the library, or else from all.
        Raises NotFound; Forbidden (it is not the viewer's); ImageInUse (it names the jobs).
        """
        with self.database.write() as session:
            image = select(ImageRow.digest).where(ImageRow.digest == digest)
            if session.scalars(image.with_for_update()).one_or_none() is None:
                raise missing(digest)
            holdings = self._removable(session, viewer, digest)
            for holding in holdings:
                refuse_if_needed(session, holding, viewer)
                session.execute(delete(HoldingRow).where(HoldingRow.id == holding.id))
            session.execute(delete(ImageRow).where(ImageRow.digest == digest, unheld(), ~needed()))

    def _removable(self, session: Session, viewer: Viewer, digest: str) -> builtins.list[HoldingRow]:
        query = select(HoldingRow).where(HoldingRow.image == digest)
        own = session.scalars(query.where(may_write(viewer)).order_by(HoldingRow.namespace == LIBRARY))
        found = own.first()
        if found is not None:
            return [found]
        if viewer.admin and viewer.image is None:
            return builtins.list(session.scalars(query))
        return [self._own(session, viewer, digest)]

    def check_signature(self, digest: str, signature: str) -> None:
        """Raises InvalidRequest (not one by its form); ImageRejected: a trusted one is asked for."""
        check_form(signature)
        if self.config.image_trust_dir is not None:
            require_signed(digest, signature, trusted_keys(self.config.image_trust_dir))

    def _own(self, session: Session, viewer: Viewer, digest: str) -> HoldingRow:
        """The viewer's holding, or the library's for an administrator, to be changed."""
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

    def _detail(
        self, session: Session, viewer: Viewer, digest: str, holding: HoldingRow | None
    ) -> ImageDetail:
        holding = holding or holding_of(session, viewer, digest)
        image = session.get(ImageRow, digest)
        if image is None:
            raise missing(digest)
        data = manifest_of(session, digest)
        parsed(data, digest)
        mine = holding is not None and (viewer.sees_all or holding.owner == viewer.user)
        return ImageDetail(
            digest=digest,
            owner=_owner(holding) if holding else "",
            visibility=Visibility(holding.visibility) if holding else Visibility.PRIVATE,
            shares=shares_of(session, holding) if holding and mine else (),
            tags=_tags(session, viewer, digest),
            created=holding.created if holding else image.created,
            expires=holding.expires if holding else None,
            deprecated=holding.deprecated if holding else "",
            origin=Origin.model_validate(holding.origin) if holding else Origin(),
            signers=self._signers(digest, holding.signature if holding else ""),
            size=image.size,
            stored=image.stored,
            manifest=json.loads(data),
        )

    def _signers(self, digest: str, signature: str) -> tuple[str, ...]:
        folder = self.config.image_trust_dir
        if folder is None or not signature:
            return ()
        return signers(digest, signature, trusted_keys(folder))


def lock_image(session: Session, digest: str) -> None:
    """Keep an image's row until the transaction ends.  Raises NotFound."""
    query = select(ImageRow.digest).where(ImageRow.digest == digest)
    if session.scalars(query.with_for_update(read=True, key_share=True)).one_or_none() is None:
        raise missing(digest)


def held(session: Session, viewer: Viewer, digest: str, namespace: str) -> HoldingRow | None:
    """The holding of an image in a namespace of the viewer, ours until the transaction ends.

    Raises Forbidden: the namespace was made of another user's name, and is that one's.
    """
    query = select(HoldingRow).where(HoldingRow.image == digest, HoldingRow.namespace == namespace)
    found = session.scalars(query.with_for_update(of=HoldingRow)).one_or_none()
    if found is not None:
        _check_owner(namespace, found.owner, viewer.user)
    return found


def _check_owner(namespace: str, owner: str, user: str) -> None:
    """Made-up namespaces are told apart by 32 bits, which one can try to hit."""
    if namespace != LIBRARY and owner != user:
        raise Forbidden(f"the namespace {namespace!r} is another user's")


def hold(session: Session, viewer: Viewer, digest: str, namespace: str) -> HoldingRow:
    """Begin to hold an image whose row is locked; the quota is the caller's to look at."""
    row = HoldingRow(
        image=digest,
        namespace=namespace,
        owner=viewer.user,
        visibility=Visibility.PRIVATE.value,
        created=utc_now(),
        expires=None,
        deprecated="",
        origin=Origin().model_dump(mode="json"),
        signature="",
    )
    session.add(row)
    session.flush()
    return row


def set_tag(session: Session, holding: HoldingRow, name: str, tag: str) -> None:
    """Call a holding by a name of its namespace.  Raises Forbidden: see :func:`held`."""
    before = (
        select(HoldingRow.owner)
        .join(TagRow, TagRow.holding == HoldingRow.id)
        .where(TagRow.namespace == holding.namespace, TagRow.name == name, TagRow.tag == tag)
    )
    for owner in session.scalars(before):
        _check_owner(holding.namespace, owner, holding.owner)
    row = {"namespace": holding.namespace, "name": name, "tag": tag, "holding": holding.id}
    key = ("namespace", "name", "tag")
    put(session, TagRow, row, key=key, change=("holding",), returning=(TagRow.holding,))


def set_shares(session: Session, holding: HoldingRow, shares: Iterable[Share]) -> None:
    """Share a holding with these and nobody else."""
    session.execute(delete(ShareRow).where(ShareRow.holding == holding.id))
    for kind, name in sorted({(share.kind, share.name) for share in shares}):
        session.add(ShareRow(holding=holding.id, kind=kind, name=name))


def shares_of(session: Session, holding: HoldingRow) -> tuple[Share, ...]:
    """With whom a holding is shared."""
    query = select(ShareRow).where(ShareRow.holding == holding.id)
    rows = session.scalars(query.order_by(ShareRow.kind, ShareRow.name))
    return tuple(Share.model_validate({"kind": row.kind, "name": row.name}) for row in rows)


def _entry(row: Any) -> ImageInfo:
    holding, size, architecture, name, tag = row
    return ImageInfo(
        namespace=holding.namespace,
        name=name,
        tag=tag,
        digest=holding.image,
        size=size,
        architecture=architecture,
        owner=_owner(holding),
        visibility=Visibility(holding.visibility),
        created=holding.created,
        deprecated=holding.deprecated,
    )


def _cursor_of(row: Any) -> str:
    """Names have no colons, namespaces may."""
    return f"{row[0].id}:{row[3]}:{row[4]}:{row[0].namespace}"


def _after(cursor: str) -> Any:
    try:
        holding, name, tag, namespace = cursor.split(":", 3)
        return tuple_(literal(namespace), literal(name), literal(tag), literal(int(holding[:18])))
    except ValueError:
        raise bad_cursor() from None


def until(keep_days: int, present: datetime) -> datetime | None:
    """When the time of an image is over that is kept for so many days; 0: never."""
    return present + timedelta(days=keep_days) if keep_days else None


def _tags(session: Session, viewer: Viewer, digest: str) -> tuple[ImageTag, ...]:
    query = (
        select(TagRow)
        .join(HoldingRow, HoldingRow.id == TagRow.holding)
        .where(HoldingRow.image == digest, may_read(viewer), alive(utc_now()))
        .order_by(TagRow.namespace, TagRow.name, TagRow.tag)
    )
    return tuple(
        ImageTag(namespace=row.namespace, name=row.name, tag=row.tag) for row in session.scalars(query)
    )


def _owner(holding: HoldingRow) -> str:
    return LIBRARY if holding.namespace == LIBRARY else holding.owner
