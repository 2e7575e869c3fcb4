"""What attempts moved and used"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. Of earlier attempts nothing is known."""
    with op.batch_alter_table("attempts") as batch:
        batch.add_column(sa.Column("bytes", sa.JSON(), nullable=False, server_default="{}"))
        batch.add_column(sa.Column("cpu_seconds", sa.Double(), nullable=False, server_default="0"))
    # Apart: SQLite would copy the rows that are there without a value for what has no default.
    with op.batch_alter_table("attempts") as batch:
        batch.alter_column("bytes", server_default=None)
        batch.alter_column("cpu_seconds", server_default=None)


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("attempts") as batch:
        batch.drop_column("cpu_seconds")
        batch.drop_column("bytes")
