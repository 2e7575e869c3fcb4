"""Publishing: checks a manifest and its uploaded contents, and creates a named image."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from images.content import ContentLayout
from images.formats import refusal_of_raw
from images.formats.signatures import HEAD, TAIL, archive_kind
from images.manifest import MAX_MANIFEST_BYTES, ImageManifest
from repository.db.database import Database
from repository.db.sql import add_missing, upsert
from repository.images.access import may_use_content
from repository.images.catalog import check_signature, image_detail
from repository.images.content_reader import ContentReader
from repository.images.holdings import (
    add_holding,
    expiry,
    find_holding,
    set_shares,
    set_tag,
    shares_of,
)
from repository.images.names import check_name
from repository.images.permissions import LIBRARY, Viewer, require_namespace
from repository.images.quota import check_quota, stored_size
from repository.images.tables import (
    ContentRow,
    HoldingRow,
    ImageContentRow,
    ImageRow,
    UploadRow,
)
from repository.images.uploads import TRIES
from vmjobs.config import Config
from vmjobs.errors import Fault, ImageRejected, InvalidRequest, MissingChunks, Unavailable
from vmjobs.model import EMULATED_ARCHITECTURES, MIB, faults_of
from vmjobs.model import now as utc_now
from vmjobs.wire import MAX_SHARES, ImageDetail, Publication, Visibility

#: Architectures that the hypervisor drivers support.
ARCHITECTURES = frozenset({"x86_64", *EMULATED_ARCHITECTURES})


@dataclass(frozen=True)
class Publisher:
    """Publishes images."""

    database: Database
    contents: ContentReader
    config: Config

    def publish(self, viewer: Viewer, publication: Publication) -> ImageDetail:
        """Create an image and give it a name; publishing the same image again is no error.

        For an image that the viewer holds already, this only extends visibility and shares, which
        :meth:`Catalog.change` can reduce; the last call determines how long it is kept.

        Raises:
            ImageRejected: the image is refused; the message says why.
            InvalidRequest: not a name, or too many shares. Forbidden: not the viewer's namespace.
            MissingChunks: a content is missing, or the viewer never uploaded it.
            QuotaExceeded: beyond the owner's quota.
        """
        if publication.name:
            check_name(publication.namespace, publication.name, publication.tag)
        namespace = require_namespace(viewer, publication.namespace)
        manifest = self._checked_manifest(publication)
        with self.database.read() as session:
            root = _find_contents(session, viewer, manifest)[manifest.root.digest]
            layout = ContentLayout.parse(root.layout, root.digest)
        self._inspect_root(layout)
        for _ in range(TRIES):
            try:
                return self._publish(viewer, publication, namespace, manifest)
            except IntegrityError:  # the same image, or namespace, at the same moment
                continue
        raise Unavailable("database", "the image is published or removed elsewhere: try again")

    def _checked_manifest(self, publication: Publication) -> ImageManifest:
        """Validate the manifest.  Raises ImageRejected."""
        try:
            manifest = ImageManifest.model_validate_json(json.dumps(publication.manifest))
        except (ValidationError, ValueError, RecursionError) as error:
            faults = faults_of(error, "manifest.") if isinstance(error, ValidationError) else []
            text = f"{faults[0].field}: {faults[0].message}" if faults else "it is not JSON"
            raise ImageRejected(f"this is not an image manifest: {text}", faults=faults) from error
        faults = list(self._faults(manifest))
        if faults:
            raise ImageRejected(faults[0].message, faults=faults)
        check_signature(self.config, manifest.digest, publication.signature)
        return manifest

    def _faults(self, manifest: ImageManifest) -> list[Fault]:
        faults = []
        if len(manifest.canonical()) > MAX_MANIFEST_BYTES:
            text = f"the manifest has more than {MAX_MANIFEST_BYTES} bytes"
            faults.append(Fault("manifest", "too_large", text))
        if manifest.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            text = f"the architecture {manifest.architecture} is not supported; known: {known}"
            faults.append(Fault("manifest.architecture", "unknown_architecture", text))
        limit = self.config.max_image_size
        for part in manifest.parts():
            if part.size > limit * MIB:
                text = f"{part.digest} has {part.size} bytes; the limit here is {limit} MiB"
                faults.append(Fault("manifest", "too_large", text))
        return faults

    def _inspect_root(self, root: ContentLayout) -> None:
        """Inspect the root disk.  Raises ImageRejected if it could be anything but a raw disk."""
        head = b"".join(self.contents.read(root, 0, HEAD))
        tail = b"".join(self.contents.read(root, max(0, root.size - TAIL)))
        if why := refusal_of_raw(head, root.size, tail):
            raise ImageRejected(why, faults=[Fault("manifest.root", "raw_with_header", why)])
        if kind := archive_kind(head):
            text = f"the root disk is {kind} and not a disk"
            raise ImageRejected(text, faults=[Fault("manifest.root", "not_a_disk", text)])

    def _publish(
        self, viewer: Viewer, publication: Publication, namespace: str, manifest: ImageManifest
    ) -> ImageDetail:
        with self.database.write() as session:
            contents = _find_contents(session, viewer, manifest, lock=True)
            _put_image(session, manifest, [row.id for row in contents.values()])
            holding = self._store_holding(session, viewer, publication, namespace, manifest.digest)
            if publication.name:
                set_tag(session, holding, publication.name, publication.tag)
            if publication.upload:
                mine = (UploadRow.id == publication.upload, UploadRow.owner == viewer.user)
                session.execute(delete(UploadRow).where(*mine))
            session.flush()
            if namespace != LIBRARY:
                check_quota(session, self.config, viewer.user)
            return image_detail(session, self.config, viewer, manifest.digest, holding)

    def _store_holding(
        self, session: Session, viewer: Viewer, publication: Publication, namespace: str, digest: str
    ) -> HoldingRow:
        """Create or update the holding as the publication asks for."""
        holding = find_holding(session, viewer, digest, namespace)
        holding = holding or add_holding(session, viewer, digest, namespace)
        if publication.visibility is Visibility.PUBLIC:
            holding.visibility = publication.visibility.value
        if publication.shares:
            shares = {*publication.shares, *shares_of(session, holding)}
            if len(shares) > MAX_SHARES:
                text = f"the image would be shared with {len(shares)} users and groups; "
                text += f"it may be with {MAX_SHARES}"
                hint = "share it with a group, or remove shares: publishing again only adds some"
                raise InvalidRequest(text, hint=hint, faults=[Fault("shares", "too_many", text)])
            set_shares(session, holding, shares)
        holding.expires = expiry(publication.keep_days, utc_now())
        holding.origin = publication.origin.model_dump(mode="json")
        holding.signature = publication.signature or holding.signature
        session.flush()
        return holding


def _find_contents(
    session: Session, viewer: Viewer, manifest: ImageManifest, *, lock: bool = False
) -> dict[str, ContentRow]:
    """Return the image's contents, which the viewer uploaded or can read in another image.

    Knowing a content's digest is not enough: otherwise it would give access to private images.
    Raises MissingChunks, ImageRejected (a size differs from the manifest's).
    """
    found = {}
    for part in manifest.parts():
        query = select(ContentRow).where(ContentRow.digest == part.digest, may_use_content(viewer))
        if lock:
            query = query.with_for_update(read=True, key_share=True)
        row = session.scalars(query).one_or_none()
        if row is None:
            raise MissingChunks(
                f"the content {part.digest} is missing: it was not uploaded, or is deleted by now",
                hint="upload it, and publish again",
            )
        if row.size != part.size:
            text = f"the manifest says that {part.digest} has {part.size} bytes; it has {row.size}"
            raise ImageRejected(text, faults=[Fault("manifest", "wrong_size", text)])
        found[part.digest] = row
    return found


def _put_image(session: Session, manifest: ImageManifest, contents: list[int]) -> None:
    """Insert the image's row, locked until the transaction ends, and its references."""
    row = {
        "digest": manifest.digest,
        "manifest": manifest.canonical(),
        "architecture": manifest.architecture,
        "size": manifest.size,
        "stored": stored_size(session, contents),
        "created": utc_now(),
    }
    upsert(session, ImageRow, row, key=("digest",), change=("stored",))
    rows = [{"image": manifest.digest, "content": content} for content in sorted(set(contents))]
    add_missing(session, ImageContentRow, rows)
