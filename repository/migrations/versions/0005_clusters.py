"""Virtual clusters"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "cluster_pools",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("asked", sa.DateTime(timezone=True), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_cluster_pools")),
    )
    op.create_table(
        "clusters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("deleting", sa.String(length=16), nullable=False),
        sa.Column("stalled", sa.Integer(), nullable=False),
        sa.Column("events_count", sa.Integer(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_clusters")),
    )
    op.create_index(op.f("ix_clusters_image"), "clusters", ["image"])
    op.create_table(
        "node_shares",
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("heard", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_node_shares")),
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
        "cluster_members",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("image", sa.String(length=71), nullable=False),
        sa.Column("orders", sa.JSON(), nullable=False),
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
        sa.Column("busy", sa.Boolean(), nullable=False),
        sa.Column("jobs", sa.BigInteger(), nullable=False),
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


def downgrade() -> None:
    """Drop the tables."""
    for name in ("cluster_members", "cluster_events", "node_shares", "clusters", "cluster_pools"):
        op.drop_table(name)
