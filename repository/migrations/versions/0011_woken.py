"""Wake requests of clusters"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    with op.batch_alter_table("cluster_demands") as batch:
        batch.add_column(sa.Column("woken", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("cluster_demands") as batch:
        batch.drop_column("woken")
