"""Bytes transferred and CPU time used by attempts"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, without data for earlier attempts."""
    with op.batch_alter_table("attempts") as batch:
        batch.add_column(sa.Column("bytes", sa.JSON(), nullable=False, server_default="{}"))
        batch.add_column(sa.Column("cpu_seconds", sa.Double(), nullable=False, server_default="0"))
    # Separately: SQLite would copy existing rows without a value for a column without a default.
    with op.batch_alter_table("attempts") as batch:
        batch.alter_column("bytes", server_default=None)
        batch.alter_column("cpu_seconds", server_default=None)


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("attempts") as batch:
        batch.drop_column("cpu_seconds")
        batch.drop_column("bytes")
