"""Failure backoff of cluster VMs, and generations for rollbacks"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables. Images whose VMs have come up before are marked as proven."""
    guards = op.create_table(
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
        "cluster_generations",
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("standing", sa.String(length=16), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
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
    members = sa.table("cluster_members", sa.column("image"), sa.column("admitted"))
    rest = {"node": "", "failures": 0, "closures": 0, "until": None, "code": "PROGRESS", "why": ""}
    rest |= {"nodes": [], "proven": True, "told": None}
    came_up = sa.select(members.c.image).where(members.c.admitted > 0).distinct()
    rows = [{"image": image, **rest} for (image,) in op.get_bind().execute(came_up)]
    op.bulk_insert(guards, rows)


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("cluster_generations")
    op.drop_table("cluster_guards")
