"""Withdrawn ads of cluster VMs"""

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
    # Separately: SQLite would copy existing rows without a value for a column without a default.
    with op.batch_alter_table("cluster_members") as batch:
        batch.alter_column("withdrawn", server_default=None)


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.drop_column("withdrawn")
