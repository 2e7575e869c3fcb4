"""Operating systems of cluster machines, as they say"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; a machine that is there says it again within seconds."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.add_column(sa.Column("system", sa.String(length=128), nullable=False, server_default=""))
    # Apart: SQLite would copy the rows that are there without a value for what has no default.
    with op.batch_alter_table("cluster_members") as batch:
        batch.alter_column("system", server_default=None)


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.drop_column("system")
