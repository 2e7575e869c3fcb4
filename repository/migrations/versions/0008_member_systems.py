"""Operating systems of cluster VMs, as they report them"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; a running VM reports its system again within seconds."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.add_column(sa.Column("system", sa.String(length=128), nullable=False, server_default=""))
    # Separately: SQLite would copy existing rows without a value for a column without a default.
    with op.batch_alter_table("cluster_members") as batch:
        batch.alter_column("system", server_default=None)


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("cluster_members") as batch:
        batch.drop_column("system")
