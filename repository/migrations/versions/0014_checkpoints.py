"""Checkpoints of jobs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_checkpoints")),
    )
    op.create_index(op.f("ix_checkpoints_owner"), "checkpoints", ["owner"])
    op.create_table(
        "checkpoint_contents",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("content", BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["checkpoints.job_id"],
            name=op.f("fk_checkpoint_contents_job_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["content"], ["contents.id"], name=op.f("fk_checkpoint_contents_content")
        ),
        sa.PrimaryKeyConstraint("job_id", "content", name=op.f("pk_checkpoint_contents")),
    )
    op.create_index(op.f("ix_checkpoint_contents_content"), "checkpoint_contents", ["content"])
    job = sa.Column("job_id", sa.String(length=32), nullable=False, server_default="")
    op.add_column("uploads", job)
    op.create_index(op.f("ix_uploads_job_id"), "uploads", ["job_id"])


def downgrade() -> None:
    """Drop the tables."""
    op.drop_index(op.f("ix_uploads_job_id"), "uploads")
    op.drop_column("uploads", "job_id")
    op.drop_table("checkpoint_contents")
    op.drop_table("checkpoints")
