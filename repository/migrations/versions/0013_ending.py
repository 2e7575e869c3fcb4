"""How attempts ended while their jobs were being canceled"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    with op.batch_alter_table("attempts") as batch:
        batch.add_column(sa.Column("ending", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("attempts") as batch:
        batch.drop_column("ending")
