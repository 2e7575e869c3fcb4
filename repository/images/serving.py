"""Segments as they are sent to nodes by the thousand: everything about many in a single question.

What that question tells is taken for true for :data:`FRESH_SECONDS`, in this process. A segment
never changes, so nothing that is read can be old; but whoever was let in is let in for so long
after his share was taken back, his image removed or its time over. Only what may be read is
remembered, never a refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from sqlalchemy import ColumnElement, Executable, and_, bindparam, select, true

from repository.database import Database
from repository.images.access import ORPHAN_SECONDS, alive, may_read
from repository.images.fresh import Fresh
from repository.images.prefetching import Prefetching
from repository.images.tables import ContentSegmentRow, HoldingRow, ImageContentRow, SegmentRow
from repository.images.viewer import Viewer
from repository.objects import ObjectReader, ObjectStore
from vmjobs.config import Config
from vmjobs.errors import NotFound
from vmjobs.model import now as utc_now
from vmjobs.wire import Visibility

#: How long an answer of the database is taken for true.
FRESH_SECONDS: Final = 3.0
#: Segments that are looked up at once: whoever fetches one fetches those after it next.
AHEAD: Final = 64
#: Answers that are kept: who reads which image, and where segments are (some 3 MiB in all).
MOST_READERS: Final = 1024
MOST_PLACES: Final = 8192
#: Nodes and administrators read every image: the question is the same for all of them.
_EVERY_NODE: Final = Viewer("", node=True)


@lru_cache(maxsize=1024)
def _question(viewer: Viewer) -> Executable:
    """Where a segment and those after it are, and whether everybody may read them, if the viewer may.

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
    asked = (
        select(ContentSegmentRow.content, ContentSegmentRow.segment, public.label("public"))
        .join(SegmentRow, SegmentRow.id == ContentSegmentRow.segment)
        .join(ImageContentRow, ImageContentRow.content == ContentSegmentRow.content)
        .where(SegmentRow.digest == bindparam("segment", type_=SegmentRow.digest.type))
        .where(ImageContentRow.image == image, mine)
        .limit(1)
        .subquery()
    )
    # Segments are numbered as they came, which is in the content's order unless others had them first.
    on = and_(
        ContentSegmentRow.content == asked.c.content, ContentSegmentRow.segment >= asked.c.segment
    )
    return (
        select(SegmentRow.digest, SegmentRow.object, asked.c.public)
        .join(ContentSegmentRow, ContentSegmentRow.segment == SegmentRow.id)
        .join(asked, on)
        .order_by(ContentSegmentRow.segment)
        .limit(AHEAD)
    )


class Serving(Prefetching):
    """The part that is in a hurry."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore,
        config: Config,
        *,
        orphan_seconds: float = ORPHAN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(database, objects, config, orphan_seconds=orphan_seconds)
        self._readers: Fresh[tuple[Viewer, str], Visibility]
        self._readers = Fresh(FRESH_SECONDS, MOST_READERS, clock)
        self._places: Fresh[tuple[str, bytes], str] = Fresh(FRESH_SECONDS, MOST_PLACES, clock)

    def known_segment(
        self, viewer: Viewer, digest: str, segment: bytes
    ) -> tuple[ObjectReader, Visibility] | None:
        """As :meth:`serve_segment` where no question is needed; ``None``: one is."""
        seen_by = self._readers.get((viewer, digest))
        key = self._places.get((digest, segment))
        if seen_by is None or key is None:
            return None
        try:
            return self.objects.open(key), seen_by
        except NotFound:
            return None  # replaced, or collected

    def serve_segment(
        self, viewer: Viewer, digest: str, segment: bytes
    ) -> tuple[ObjectReader, Visibility]:
        """As :meth:`open_segment`, together with :meth:`visibility`.

        Of a viewer who might read the image up to :data:`FRESH_SECONDS` ago it is not asked again.
        """
        known = self.known_segment(viewer, digest, segment)
        if known is None:
            self._look_up(viewer, digest, segment)
            known = self.known_segment(viewer, digest, segment)
        if known is not None:
            return known
        # Whatever is wrong, the slower way says it.
        return self.open_segment(viewer, digest, segment), self.visibility(viewer, digest)

    def _look_up(self, viewer: Viewer, digest: str, segment: bytes) -> None:
        """Remember where the segment and those after it are, if the viewer may read the image."""
        values = {"image": digest, "segment": segment, "present": utc_now()}
        asked = self._readers.clock()
        with self.database.read() as session:
            question = _question(_EVERY_NODE if viewer.sees_all else viewer)
            rows = session.connection().execute(question, values).all()
        if rows:
            seen_by = Visibility.PUBLIC if rows[0].public else Visibility.PRIVATE
            self._places.keep([((digest, row.digest), row.object) for row in rows], asked)
            self._readers.keep([((viewer, digest), seen_by)], asked)
