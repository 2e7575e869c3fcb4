"""The tables of the image repository.

Segments, contents and images are identified by their bytes, and stored once for all users. A
*holding* is a user's claim to an image, in a namespace: its names, visibility and settings. Two users
who upload the same bytes have two holdings of one image.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Index,
    LargeBinary,
    SmallInteger,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from repository.db.models import BIG_ID, DIGEST, ID, Base

_TREE = String(69)
_BYTES = LargeBinary(32)
_CASCADE = "CASCADE"


class SegmentRow(Base):
    """A segment that is stored, in the object that the row names.

    stored: bytes of the object; size: bytes of content. touched: when it was last uploaded.
    damaged: a chunk failed verification: clients that have the segment have to send it again.
    """

    __tablename__ = "segments"

    id: Mapped[int] = mapped_column(BIG_ID, primary_key=True)
    digest: Mapped[bytes] = mapped_column(_BYTES, unique=True)
    object: Mapped[str] = mapped_column(String(200))
    stored: Mapped[int]
    size: Mapped[int]
    touched: Mapped[datetime] = mapped_column(index=True)
    damaged: Mapped[bool] = mapped_column(default=False)


class ChunkRow(Base):
    """The location of a chunk: a segment, and the number of the chunk in it.

    A chunk has several rows if owners have it who may not use each other's segments.
    """

    __tablename__ = "blocks"
    __table_args__ = ({"sqlite_with_rowid": False},)

    digest: Mapped[bytes] = mapped_column(_BYTES, primary_key=True)
    segment: Mapped[int] = mapped_column(
        ForeignKey("segments.id", ondelete=_CASCADE), primary_key=True, index=True
    )
    number: Mapped[int] = mapped_column(SmallInteger)


class ContentRow(Base):
    """A content, with its layout (``images.content``)."""

    __tablename__ = "contents"

    id: Mapped[int] = mapped_column(BIG_ID, primary_key=True)
    digest: Mapped[str] = mapped_column(_TREE, unique=True)
    size: Mapped[int] = mapped_column(BigInteger)
    layout: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    touched: Mapped[datetime] = mapped_column(index=True)


class ContentSegmentRow(Base):
    """A content needs a segment. Without a cascade, a needed segment cannot be deleted."""

    __tablename__ = "content_segments"
    __table_args__ = ({"sqlite_with_rowid": False},)

    content: Mapped[int] = mapped_column(ForeignKey("contents.id", ondelete=_CASCADE), primary_key=True)
    segment: Mapped[int] = mapped_column(ForeignKey("segments.id"), primary_key=True, index=True)


class ImageRow(Base):
    """An image. size: bytes of all its parts; stored: bytes that its segments occupy."""

    __tablename__ = "images"

    digest: Mapped[str] = mapped_column(DIGEST, primary_key=True)
    manifest: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    architecture: Mapped[str] = mapped_column(String(32))
    size: Mapped[int] = mapped_column(BigInteger)
    stored: Mapped[int] = mapped_column(BigInteger)
    created: Mapped[datetime]


class ImageContentRow(Base):
    """An image needs a content."""

    __tablename__ = "image_contents"

    image: Mapped[str] = mapped_column(ForeignKey("images.digest", ondelete=_CASCADE), primary_key=True)
    content: Mapped[int] = mapped_column(ForeignKey("contents.id"), primary_key=True, index=True)


class HoldingRow(Base):
    """A user's holding of an image. signature: of the image, as its holder gave it; or empty."""

    __tablename__ = "image_holdings"
    __table_args__ = (UniqueConstraint("image", "namespace"),)

    id: Mapped[int] = mapped_column(BIG_ID, primary_key=True)
    image: Mapped[str] = mapped_column(ForeignKey("images.digest", ondelete=_CASCADE))
    namespace: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(255), index=True)
    visibility: Mapped[str] = mapped_column(String(16))
    created: Mapped[datetime]
    expires: Mapped[datetime | None] = mapped_column(index=True)
    deprecated: Mapped[str] = mapped_column(Text, default="")
    origin: Mapped[dict[str, Any]]
    signature: Mapped[str] = mapped_column(Text, default="")


class ShareRow(Base):
    """A user or a group that may read a holding."""

    __tablename__ = "image_shares"
    __table_args__ = (Index(None, "kind", "name"),)

    holding: Mapped[int] = mapped_column(
        ForeignKey("image_holdings.id", ondelete=_CASCADE), primary_key=True
    )
    kind: Mapped[str] = mapped_column(String(8), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)


class TagRow(Base):
    """A name of a holding, within the holding's namespace."""

    __tablename__ = "image_tags"

    namespace: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    tag: Mapped[str] = mapped_column(String(64), primary_key=True)
    holding: Mapped[int] = mapped_column(ForeignKey("image_holdings.id", ondelete=_CASCADE), index=True)


class UploadRow(Base):
    """A running upload.

    size: announced bytes of content; content: bytes of new content received; received: bytes stored
    for it. touched: when it was last used. job_id: of the job whose checkpoint it brings; ``""``: none.
    """

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(255), index=True)
    job_id: Mapped[str] = mapped_column(String(32), default="", server_default="", index=True)
    size: Mapped[int] = mapped_column(BigInteger)
    content: Mapped[int] = mapped_column(BigInteger, default=0)
    received: Mapped[int] = mapped_column(BigInteger, default=0)
    created: Mapped[datetime]
    touched: Mapped[datetime] = mapped_column(index=True)


class UploadSegmentRow(Base):
    """A segment that a running upload brought, or asked for while its owner may read it.

    Each row proves that the owner has the bytes, or was allowed to read them.
    """

    __tablename__ = "upload_segments"
    __table_args__ = ({"sqlite_with_rowid": False},)

    upload: Mapped[str] = mapped_column(ForeignKey("uploads.id", ondelete=_CASCADE), primary_key=True)
    segment: Mapped[int] = mapped_column(ForeignKey("segments.id"), primary_key=True, index=True)


class UploadContentRow(Base):
    """A content whose layout a running upload brought."""

    __tablename__ = "upload_contents"

    upload: Mapped[str] = mapped_column(ForeignKey("uploads.id", ondelete=_CASCADE), primary_key=True)
    content: Mapped[int] = mapped_column(ForeignKey("contents.id"), primary_key=True, index=True)


class CheckpointRow(Base):
    """The last checkpoint of a job. document: a ``vmjobs.model.Checkpoint``.

    job_id: of a job of the service, or of a transparent job (``repository.db.models.CondorJobRow``).
    stored: bytes that its segments occupy, which count against the owner's quota. failures: runs that
    failed to resume from it.
    """

    __tablename__ = "checkpoints"

    job_id: Mapped[str] = mapped_column(ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(255), index=True)
    created: Mapped[datetime]
    stored: Mapped[int] = mapped_column(BigInteger)
    document: Mapped[dict[str, Any]]
    failures: Mapped[int] = mapped_column(default=0)


class CheckpointContentRow(Base):
    """A checkpoint needs a content."""

    __tablename__ = "checkpoint_contents"

    job_id: Mapped[str] = mapped_column(
        ForeignKey("checkpoints.job_id", ondelete=_CASCADE), primary_key=True
    )
    content: Mapped[int] = mapped_column(ForeignKey("contents.id"), primary_key=True, index=True)


class PrefetchRow(Base):
    """A request to a node to fetch an image when it is idle."""

    __tablename__ = "prefetches"

    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    image: Mapped[str] = mapped_column(
        ForeignKey("images.digest", ondelete=_CASCADE), primary_key=True, index=True
    )
