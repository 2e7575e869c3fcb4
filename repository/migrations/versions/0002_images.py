"""Tables of the image repository"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
#: In an order in which the tables can be dropped.
TABLES = (
    "image_tags",
    "image_shares",
    "upload_segments",
    "upload_contents",
    "prefetches",
    "image_holdings",
    "image_contents",
    "content_segments",
    "blocks",
    "uploads",
    "segments",
    "images",
    "contents",
)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "contents",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("digest", sa.String(length=69), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("layout", sa.LargeBinary(), nullable=False),
        sa.Column("touched", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_contents")),
        sa.UniqueConstraint("digest", name=op.f("uq_contents_digest")),
    )
    op.create_index(op.f("ix_contents_touched"), "contents", ["touched"])

    op.create_table(
        "images",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("architecture", sa.String(length=32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_images")),
    )

    op.create_table(
        "segments",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("object", sa.String(length=200), nullable=False),
        sa.Column("stored", sa.Integer(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("touched", sa.DateTime(timezone=True), nullable=False),
        sa.Column("damaged", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_segments")),
        sa.UniqueConstraint("digest", name=op.f("uq_segments_digest")),
    )
    op.create_index(op.f("ix_segments_touched"), "segments", ["touched"])

    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("touched", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_owner"), "uploads", ["owner"])
    op.create_index(op.f("ix_uploads_touched"), "uploads", ["touched"])

    op.create_table(
        "blocks",
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("segment", BIG_ID, nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["segment"], ["segments.id"], name=op.f("fk_blocks_segment"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blocks")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_blocks_segment"), "blocks", ["segment"])

    op.create_table(
        "content_segments",
        sa.Column("content", BIG_ID, nullable=False),
        sa.Column("segment", BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["content"], ["contents.id"], name=op.f("fk_content_segments_content"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["segment"], ["segments.id"], name=op.f("fk_content_segments_segment")),
        sa.PrimaryKeyConstraint("content", "segment", name=op.f("pk_content_segments")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_content_segments_segment"), "content_segments", ["segment"])

    op.create_table(
        "image_contents",
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("content", BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.id"], name=op.f("fk_image_contents_content")),
        sa.ForeignKeyConstraint(
            ["image"], ["images.digest"], name=op.f("fk_image_contents_image"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("image", "content", name=op.f("pk_image_contents")),
    )
    op.create_index(op.f("ix_image_contents_content"), "image_contents", ["content"])

    op.create_table(
        "image_holdings",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("visibility", sa.String(length=16), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deprecated", sa.Text(), nullable=False),
        sa.Column("origin", sa.JSON(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["image"], ["images.digest"], name=op.f("fk_image_holdings_image"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_image_holdings")),
        sa.UniqueConstraint("image", "namespace", name=op.f("uq_image_holdings_image_namespace")),
    )
    op.create_index(op.f("ix_image_holdings_expires"), "image_holdings", ["expires"])
    op.create_index(op.f("ix_image_holdings_owner"), "image_holdings", ["owner"])

    op.create_table(
        "prefetches",
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(
            ["image"], ["images.digest"], name=op.f("fk_prefetches_image"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node", "image", name=op.f("pk_prefetches")),
    )
    op.create_index(op.f("ix_prefetches_image"), "prefetches", ["image"])

    op.create_table(
        "upload_contents",
        sa.Column("upload", sa.String(length=32), nullable=False),
        sa.Column("content", BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.id"], name=op.f("fk_upload_contents_content")),
        sa.ForeignKeyConstraint(
            ["upload"], ["uploads.id"], name=op.f("fk_upload_contents_upload"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("upload", "content", name=op.f("pk_upload_contents")),
    )
    op.create_index(op.f("ix_upload_contents_content"), "upload_contents", ["content"])

    op.create_table(
        "upload_segments",
        sa.Column("upload", sa.String(length=32), nullable=False),
        sa.Column("segment", BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(["segment"], ["segments.id"], name=op.f("fk_upload_segments_segment")),
        sa.ForeignKeyConstraint(
            ["upload"], ["uploads.id"], name=op.f("fk_upload_segments_upload"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("upload", "segment", name=op.f("pk_upload_segments")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_upload_segments_segment"), "upload_segments", ["segment"])

    op.create_table(
        "image_shares",
        sa.Column("holding", BIG_ID, nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["holding"], ["image_holdings.id"], name=op.f("fk_image_shares_holding"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("holding", "kind", "name", name=op.f("pk_image_shares")),
    )
    op.create_index(op.f("ix_image_shares_kind_name"), "image_shares", ["kind", "name"])

    op.create_table(
        "image_tags",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("tag", sa.String(length=64), nullable=False),
        sa.Column("holding", BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["holding"], ["image_holdings.id"], name=op.f("fk_image_tags_holding"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("namespace", "name", "tag", name=op.f("pk_image_tags")),
    )
    op.create_index(op.f("ix_image_tags_holding"), "image_tags", ["holding"])

    op.create_index(op.f("ix_submissions_image_digest"), "submissions", ["image_digest"])


def downgrade() -> None:
    """Drop the tables."""
    op.drop_index(op.f("ix_submissions_image_digest"), table_name="submissions")
    for table in TABLES:
        op.drop_table(table)
