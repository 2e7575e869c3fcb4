"""API tokens that can be listed and revoked"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table. Tokens that were issued before are recorded at their next use."""
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("issued", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_tokens")),
    )
    op.create_index(op.f("ix_api_tokens_subject"), "api_tokens", ["subject"])
    op.create_index(op.f("ix_api_tokens_expires"), "api_tokens", ["expires"])


def downgrade() -> None:
    """Drop the table. Revoked tokens become valid again until they expire."""
    op.drop_table("api_tokens")
