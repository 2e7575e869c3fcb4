"""Builds: a generation that fences off earlier builders, and a mark that forbids canceling"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. A build that was begun keeps the number that its builder has."""
    with op.batch_alter_table("builds") as table:
        table.add_column(sa.Column("generation", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("naming", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute("UPDATE builds SET generation = attempts")
    with op.batch_alter_table("builds") as table:
        table.alter_column("generation", server_default=None)
        table.alter_column("naming", server_default=None)


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("builds") as table:
        table.drop_column("naming")
        table.drop_column("generation")
