"""Serves segments to nodes by the thousand, with a single query for many segments.

Each process caches the result of a query for :data:`CACHE_SECONDS`. A segment never changes, so its
data is never stale; but a viewer keeps access for this time after a share is revoked, or the image is
removed or expires. Only grants are cached, never refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from sqlalchemy import ColumnElement, Executable, and_, bindparam, select, true

from repository.db.database import Database
from repository.images.access import is_unexpired, may_read
from repository.images.content_reader import ContentReader
from repository.images.permissions import Viewer
from repository.images.tables import ContentSegmentRow, HoldingRow, ImageContentRow, SegmentRow
from repository.images.ttl_cache import TtlCache
from repository.storage.objects import ObjectReader, ObjectStore
from vmjobs.errors import NotFound
from vmjobs.model import now as utc_now
from vmjobs.wire import Visibility

#: How long query results are cached.
CACHE_SECONDS: Final = 3.0
#: Segments looked up at once: a client that fetches one fetches those after it next.
LOOKAHEAD: Final = 64
#: Cached entries: grants to viewers, and keys of segments (some 3 MiB in all).
MAX_READERS: Final = 1024
MAX_SEGMENT_KEYS: Final = 8192
#: Nodes and administrators read every image: one query serves all of them.
_EVERY_NODE: Final = Viewer("", node=True)


@lru_cache(maxsize=1024)
def _segment_query(viewer: Viewer) -> Executable:
    """Build the query for a readable segment, the segments after it, and their visibility.

    It is cached, because building such a query takes longer than running it.
    """
    image = bindparam("image", type_=HoldingRow.image.type)
    present = bindparam("present", type_=HoldingRow.expires.type)
    held = select(HoldingRow.id).where(HoldingRow.image == image, is_unexpired(present))
    public = held.where(HoldingRow.visibility == Visibility.PUBLIC.value).exists()
    mine: ColumnElement[bool] = held.where(may_read(viewer)).exists()
    if viewer.image is not None or viewer.sees_all:
        # These viewers may read an image even if all its holdings have expired.
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
    # Segments are numbered in the order of upload, mostly the content's order.
    on = and_(
        ContentSegmentRow.content == asked.c.content, ContentSegmentRow.segment >= asked.c.segment
    )
    return (
        select(SegmentRow.digest, SegmentRow.object, asked.c.public)
        .join(ContentSegmentRow, ContentSegmentRow.segment == SegmentRow.id)
        .join(asked, on)
        .order_by(ContentSegmentRow.segment)
        .limit(LOOKAHEAD)
    )


class SegmentServer:
    """Serves segments of images fast."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore,
        contents: ContentReader,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._objects = objects
        self._contents = contents
        self._readers: TtlCache[tuple[Viewer, str], Visibility]
        self._readers = TtlCache(CACHE_SECONDS, MAX_READERS, clock)
        self._segment_keys: TtlCache[tuple[str, bytes], str] = TtlCache(
            CACHE_SECONDS, MAX_SEGMENT_KEYS, clock
        )

    def cached(
        self, viewer: Viewer, digest: str, segment: bytes
    ) -> tuple[ObjectReader, Visibility] | None:
        """As :meth:`open`, but only from the cache; ``None``: a query is needed."""
        seen_by = self._readers.get((viewer, digest))
        key = self._segment_keys.get((digest, segment))
        if seen_by is None or key is None:
            return None
        try:
            return self._objects.open(key), seen_by
        except NotFound:
            return None  # replaced or deleted

    def open(self, viewer: Viewer, digest: str, segment: bytes) -> tuple[ObjectReader, Visibility]:
        """As :meth:`ContentReader.open_segment`, together with the image's visibility.

        Access that was granted up to :data:`CACHE_SECONDS` ago is not checked again.
        """
        known = self.cached(viewer, digest, segment)
        if known is None:
            self._look_up(viewer, digest, segment)
            known = self.cached(viewer, digest, segment)
        if known is not None:
            return known
        # The slow path raises the appropriate error.
        reader = self._contents.open_segment(viewer, digest, segment)
        return reader, self._contents.catalog.visibility(viewer, digest)

    def _look_up(self, viewer: Viewer, digest: str, segment: bytes) -> None:
        """Cache the keys of the segment and those after it, if the viewer may read the image."""
        values = {"image": digest, "segment": segment, "present": utc_now()}
        asked = self._readers.clock()
        with self._database.read() as session:
            question = _segment_query(_EVERY_NODE if viewer.sees_all else viewer)
            rows = session.connection().execute(question, values).all()
        if rows:
            seen_by = Visibility.PUBLIC if rows[0].public else Visibility.PRIVATE
            self._segment_keys.keep([((digest, row.digest), row.object) for row in rows], asked)
            self._readers.keep([((viewer, digest), seen_by)], asked)
