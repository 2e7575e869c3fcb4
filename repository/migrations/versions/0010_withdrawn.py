"""Machines of clusters that their pool was told are no more"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.add_column(sa.Column("withdrawn", sa.Integer(), nullable=False, server_default="0"))
    # Apart: SQLite would copy the rows that are there without a value for what has no default.
    with op.batch_alter_table("cluster_members") as batch:
        batch.alter_column("withdrawn", server_default=None)


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.drop_column("withdrawn")
