"""Counts of cluster events, and of tokens for cluster VMs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    with op.batch_alter_table("clusters") as batch:
        batch.add_column(sa.Column("happened", sa.JSON(), nullable=False, server_default="{}"))
    with op.batch_alter_table("node_shares") as batch:
        for name in ("tokens", "refusals"):
            batch.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    # Separately: SQLite would copy existing rows without a value for a column without a default.
    with op.batch_alter_table("clusters") as batch:
        batch.alter_column("happened", server_default=None)
    with op.batch_alter_table("node_shares") as batch:
        for name in ("tokens", "refusals"):
            batch.alter_column(name, server_default=None)


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("node_shares") as batch:
        batch.drop_column("refusals")
        batch.drop_column("tokens")
    with op.batch_alter_table("clusters") as batch:
        batch.drop_column("happened")
