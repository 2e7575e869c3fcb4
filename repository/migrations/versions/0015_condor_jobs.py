"""Checkpoints of transparent jobs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the table, and allow checkpoints of transparent jobs."""
    op.create_table(
        "condor_jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("attempt", sa.String(length=32), nullable=False),
        sa.Column("failed", sa.String(length=32), nullable=False),
        sa.Column("heard", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_condor_jobs")),
    )
    op.create_index(op.f("ix_condor_jobs_heard"), "condor_jobs", ["heard"])
    _make_checkpoints(of_the_services=False)


def downgrade() -> None:
    """Delete the checkpoints of transparent jobs, and drop the table."""
    op.execute("DELETE FROM checkpoints WHERE job_id IN (SELECT id FROM condor_jobs)")
    _make_checkpoints(of_the_services=True)
    op.drop_table("condor_jobs")


def _make_checkpoints(*, of_the_services: bool) -> None:
    """Recreate both tables with their rows, since SQLite cannot drop a constraint.

    Dropping a referenced table alone would delete the rows that refer to it.
    """
    for table, column in (("checkpoints", "owner"), ("checkpoint_contents", "content")):
        op.drop_index(op.f(f"ix_{table}_{column}"), table)
        op.execute(f"CREATE TABLE old_{table} AS SELECT * FROM {table}")  # noqa: S608 - our own names
    op.drop_table("checkpoint_contents")
    op.drop_table("checkpoints")
    jobs = sa.ForeignKeyConstraint(
        ["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id"), ondelete="CASCADE"
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_checkpoints")),
        *([jobs] if of_the_services else []),
    )
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
    for table, column in (("checkpoints", "owner"), ("checkpoint_contents", "content")):
        op.execute(f"INSERT INTO {table} SELECT * FROM old_{table}")  # noqa: S608 - our own names
        op.execute(f"DROP TABLE old_{table}")
        op.create_index(op.f(f"ix_{table}_{column}"), table, [column])
