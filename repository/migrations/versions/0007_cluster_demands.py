"""Autoscaling of clusters by demand"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "cluster_demands",
        sa.Column("cluster", sa.String(length=32), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("most", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("known", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster"],
            ["clusters.name"],
            name=op.f("fk_cluster_demands_cluster"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("cluster", name=op.f("pk_cluster_demands")),
    )
    op.create_table(
        "cluster_weighings",
        sa.Column("pool", sa.String(length=255), nullable=False),
        sa.Column("again", sa.DateTime(timezone=True), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("offers", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("pool", name=op.f("pk_cluster_weighings")),
    )


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("cluster_weighings")
    op.drop_table("cluster_demands")
