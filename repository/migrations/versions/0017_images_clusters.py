"""Tables of images, checkpoints and clusters"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_checkpoints")),
    )
    op.create_index(op.f("ix_checkpoints_owner"), "checkpoints", ["owner"])
    op.create_table(
        "cluster_guards",
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("closures", sa.Integer(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("code", sa.String(length=32), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("proven", sa.Boolean(), nullable=False),
        sa.Column("told", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("image", "node", name=op.f("pk_cluster_guards")),
    )
    op.create_table(
        "cluster_pools",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("asked", sa.DateTime(timezone=True), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_cluster_pools")),
    )
    op.create_table(
        "cluster_weighings",
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("again", sa.DateTime(timezone=True), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("offers", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("pool", name=op.f("pk_cluster_weighings")),
    )
    op.create_table(
        "clusters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("deleting", sa.String(length=16), nullable=False),
        sa.Column("stalled", sa.Integer(), nullable=False),
        sa.Column("events_count", sa.Integer(), nullable=False),
        sa.Column("happened", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_clusters")),
    )
    op.create_index(op.f("ix_clusters_image"), "clusters", ["image"])
    op.create_table(
        "contents",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
        "node_shares",
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("heard", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("refusals", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_node_shares")),
    )
    op.create_table(
        "segments",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
        sa.Column("job_id", sa.String(length=32), server_default="", nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("touched", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_job_id"), "uploads", ["job_id"])
    op.create_index(op.f("ix_uploads_owner"), "uploads", ["owner"])
    op.create_index(op.f("ix_uploads_touched"), "uploads", ["touched"])
    op.create_table(
        "blocks",
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("segment", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["segment"], ["segments.id"], name=op.f("fk_blocks_segment"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", "segment", name=op.f("pk_blocks")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_blocks_segment"), "blocks", ["segment"])
    op.create_table(
        "checkpoint_contents",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("content", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(
            ["content"], ["contents.id"], name=op.f("fk_checkpoint_contents_content")
        ),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["checkpoints.job_id"],
            name=op.f("fk_checkpoint_contents_job_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "content", name=op.f("pk_checkpoint_contents")),
    )
    op.create_index(op.f("ix_checkpoint_contents_content"), "checkpoint_contents", ["content"])
    op.create_table(
        "cluster_demands",
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("most", sa.Integer(), nullable=False),
        sa.Column("woken", sa.DateTime(timezone=True), nullable=True),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("known", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster"], ["clusters.name"], name=op.f("fk_cluster_demands_cluster"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("cluster", name=op.f("pk_cluster_demands")),
    )
    op.create_table(
        "cluster_events",
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("code", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster"], ["clusters.name"], name=op.f("fk_cluster_events_cluster"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("cluster", "seq", name=op.f("pk_cluster_events")),
    )
    op.create_table(
        "cluster_generations",
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("standing", sa.String(length=16), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster"],
            ["clusters.name"],
            name=op.f("fk_cluster_generations_cluster"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("cluster", "standing", name=op.f("pk_cluster_generations")),
    )
    op.create_index(op.f("ix_cluster_generations_image"), "cluster_generations", ["image"])
    op.create_table(
        "cluster_members",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("orders", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("cpus", sa.Integer(), nullable=False),
        sa.Column("memory", sa.Integer(), nullable=False),
        sa.Column("disk", sa.Integer(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("goal", sa.String(length=16), nullable=False),
        sa.Column("admitted", sa.Integer(), nullable=False),
        sa.Column("condemned", sa.Integer(), nullable=False),
        sa.Column("why", sa.String(length=32), nullable=False),
        sa.Column("why_message", sa.Text(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("hypervisor", sa.String(length=16), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("retry", sa.DateTime(timezone=True), nullable=True),
        sa.Column("advertised", sa.Integer(), nullable=False),
        sa.Column("withdrawn", sa.Integer(), nullable=False),
        sa.Column("busy", sa.Boolean(), nullable=False),
        sa.Column("jobs", sa.BigInteger(), nullable=False),
        sa.Column("system", sa.String(length=128), nullable=False),
        sa.Column("waiting", sa.DateTime(timezone=True), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("up_since", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["cluster"], ["clusters.name"], name=op.f("fk_cluster_members_cluster"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster_members")),
        sa.UniqueConstraint("name", name=op.f("uq_cluster_members_name")),
    )
    op.create_index(
        op.f("ix_cluster_members_cluster_generation"), "cluster_members", ["cluster", "generation"]
    )
    op.create_index(op.f("ix_cluster_members_image"), "cluster_members", ["image"])
    op.create_index(op.f("ix_cluster_members_node"), "cluster_members", ["node"])
    op.create_table(
        "content_segments",
        sa.Column("content", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("segment", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
        sa.Column("content", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(["content"], ["contents.id"], name=op.f("fk_image_contents_content")),
        sa.ForeignKeyConstraint(
            ["image"], ["images.digest"], name=op.f("fk_image_contents_image"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("image", "content", name=op.f("pk_image_contents")),
    )
    op.create_index(op.f("ix_image_contents_content"), "image_contents", ["content"])
    op.create_table(
        "image_holdings",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("visibility", sa.String(length=16), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deprecated", sa.Text(), nullable=False),
        sa.Column("origin", sa.JSON(none_as_null=True), nullable=False),
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
        sa.Column("content", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
        sa.Column("segment", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
        sa.Column("holding", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
        sa.Column("holding", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.ForeignKeyConstraint(
            ["holding"], ["image_holdings.id"], name=op.f("fk_image_tags_holding"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("namespace", "name", "tag", name=op.f("pk_image_tags")),
    )
    op.create_index(op.f("ix_image_tags_holding"), "image_tags", ["holding"])


def downgrade() -> None:
    """Drop the tables."""
    for name in (
        "image_tags",
        "image_shares",
        "upload_segments",
        "upload_contents",
        "prefetches",
        "image_holdings",
        "image_contents",
        "content_segments",
        "cluster_members",
        "cluster_generations",
        "cluster_events",
        "cluster_demands",
        "checkpoint_contents",
        "blocks",
        "uploads",
        "segments",
        "node_shares",
        "images",
        "contents",
        "clusters",
        "cluster_weighings",
        "cluster_pools",
        "cluster_guards",
        "checkpoints",
    ):
        op.drop_table(name)
