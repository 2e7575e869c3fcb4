"""Segments as they are sent to nodes by the thousand: everything about one in a single question."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import ColumnElement, Executable, bindparam, select, true

from repository.images.access import alive, may_read
from repository.images.prefetching import Prefetching
from repository.images.tables import ContentSegmentRow, HoldingRow, ImageContentRow, SegmentRow
from repository.images.viewer import Viewer
from repository.objects import ObjectReader
from vmjobs.errors import NotFound
from vmjobs.model import now as utc_now
from vmjobs.wire import Visibility


@lru_cache(maxsize=1024)
def _question(viewer: Viewer) -> Executable:
    """Where a segment is, and whether everybody may read it, if the viewer may.

    To put such a question together takes longer than to have it answered.
    """
    image = bindparam("image", type_=HoldingRow.image.type)
    present = bindparam("present", type_=HoldingRow.expires.type)
    held = select(HoldingRow.id).where(HoldingRow.image == image, alive(present))
    public = held.where(HoldingRow.visibility == Visibility.PUBLIC.value).exists()
    mine: ColumnElement[bool] = held.where(may_read(viewer)).exists()
    if viewer.image is not None or viewer.sees_all:
        # Their images may be read even where nobody's time for them is left.
        mine = image == viewer.image if viewer.image is not None else true()
    return (
        select(SegmentRow.object, public.label("public"))
        .join(ContentSegmentRow, ContentSegmentRow.segment == SegmentRow.id)
        .join(ImageContentRow, ImageContentRow.content == ContentSegmentRow.content)
        .where(SegmentRow.digest == bindparam("segment", type_=SegmentRow.digest.type))
        .where(ImageContentRow.image == image, mine)
        .limit(1)
    )


class Serving(Prefetching):
    """The part that is in a hurry."""

    def serve_segment(
        self, viewer: Viewer, digest: str, segment: bytes
    ) -> tuple[ObjectReader, Visibility]:
        """As :meth:`open_segment`, together with :meth:`visibility`."""
        values = {"image": digest, "segment": segment, "present": utc_now()}
        with self.database.read() as session:
            row = session.connection().execute(_question(viewer), values).first()
        if row is not None:
            try:
                reader = self.objects.open(row.object)
            except NotFound:
                pass  # replaced at this moment
            else:
                return reader, Visibility.PUBLIC if row.public else Visibility.PRIVATE
        # Whatever is wrong, the slower way says it.
        return self.open_segment(viewer, digest, segment), self.visibility(viewer, digest)
