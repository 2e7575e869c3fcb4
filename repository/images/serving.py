"""Segments as they are sent to nodes by the thousand: everything about one in a single question."""

from __future__ import annotations

from sqlalchemy import select, true

from repository.images.access import alive, may_read
from repository.images.prefetching import Prefetching
from repository.images.tables import ContentSegmentRow, HoldingRow, ImageContentRow, SegmentRow
from repository.images.viewer import Viewer
from repository.objects import ObjectReader
from vmjobs.errors import NotFound
from vmjobs.model import now as utc_now
from vmjobs.wire import Visibility


class Serving(Prefetching):
    """The part that is in a hurry."""

    def serve_segment(
        self, viewer: Viewer, digest: str, segment: bytes
    ) -> tuple[ObjectReader, Visibility]:
        """As :meth:`open_segment`, together with :meth:`visibility`."""
        held = select(HoldingRow.id).where(HoldingRow.image == digest, alive(utc_now()))
        mine = viewer.sees_all or viewer.image == digest
        query = (
            select(
                SegmentRow.object,
                held.where(HoldingRow.visibility == Visibility.PUBLIC.value).exists().label("public"),
            )
            .join(ContentSegmentRow, ContentSegmentRow.segment == SegmentRow.id)
            .join(ImageContentRow, ImageContentRow.content == ContentSegmentRow.content)
            .where(SegmentRow.digest == segment, ImageContentRow.image == digest)
            .where(true() if mine else held.where(may_read(viewer)).exists())
            .limit(1)
        )
        with self.database.read() as session:
            row = session.execute(query).first()
        if row is not None:
            try:
                reader = self.objects.open(row.object)
            except NotFound:
                pass  # replaced at this moment
            else:
                return reader, Visibility.PUBLIC if row.public else Visibility.PRIVATE
        # Whatever is wrong, the slower way says it.
        return self.open_segment(viewer, digest, segment), self.visibility(viewer, digest)
