"""Tables of jobs, nodes, builds and tokens"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

# The first one: earlier numbers were steps of development, before the first release.
revision = "0016"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
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
    op.create_index(op.f("ix_api_tokens_expires"), "api_tokens", ["expires"])
    op.create_index(op.f("ix_api_tokens_subject"), "api_tokens", ["subject"])
    op.create_table(
        "blob_owners",
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.Boolean(), nullable=False),
        sa.Column("touched", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", "digest", name=op.f("pk_blob_owners")),
    )
    op.create_index(op.f("ix_blob_owners_digest"), "blob_owners", ["digest"])
    op.create_index(op.f("ix_blob_owners_owner_used"), "blob_owners", ["owner", "used"])
    op.create_index(op.f("ix_blob_owners_used_touched"), "blob_owners", ["used", "touched"])
    op.create_table(
        "builds",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=True),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("request", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("step", sa.String(length=200), nullable=False),
        sa.Column("progress", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("naming", sa.Boolean(), nullable=False),
        sa.Column("sent", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sends", sa.Integer(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_builds")),
        sa.UniqueConstraint("owner", "key", name=op.f("uq_builds_owner_key")),
    )
    op.create_index(op.f("ix_builds_owner_id"), "builds", ["owner", "id"])
    op.create_index(op.f("ix_builds_state"), "builds", ["state"])
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
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("heard", sa.DateTime(timezone=True), nullable=False),
        sa.Column("description", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_nodes")),
    )
    op.create_index(op.f("ix_nodes_heard"), "nodes", ["heard"])
    op.create_table(
        "submissions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=True),
        sa.Column("body_digest", sa.String(length=71), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("image_digest", sa.String(length=71), nullable=False),
        sa.Column("spec", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("forgotten", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_submissions")),
        sa.UniqueConstraint("owner", "key", name=op.f("uq_submissions_owner_key")),
    )
    op.create_index(op.f("ix_submissions_forgotten"), "submissions", ["forgotten"])
    op.create_index(op.f("ix_submissions_image_digest"), "submissions", ["image_digest"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("array_id", sa.String(length=32), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason_code", sa.String(length=32), nullable=False),
        sa.Column("reason_message", sa.Text(), nullable=False),
        sa.Column("reason_actor", sa.String(length=16), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("events_count", sa.Integer(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.String(length=32), nullable=False),
        sa.Column("dispatched", sa.DateTime(timezone=True), nullable=True),
        sa.Column("schedd", sa.String(length=255), nullable=True),
        sa.Column("cluster", sa.Integer(), nullable=True),
        sa.Column("proc", sa.Integer(), nullable=True),
        sa.Column("grid_job_id", sa.String(length=512), nullable=False),
        sa.Column("batch_status", sa.String(length=16), nullable=False),
        sa.Column("batch_reason", sa.Text(), nullable=False),
        sa.Column("batch_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("batch_exit", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["array_id"], ["submissions.id"], name=op.f("fk_jobs_array_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_array_id_index"), "jobs", ["array_id", "index"])
    op.create_index(op.f("ix_jobs_owner_created"), "jobs", ["owner", "created"])
    op.create_index(op.f("ix_jobs_owner_id"), "jobs", ["owner", "id"])
    op.create_index(op.f("ix_jobs_settled_state"), "jobs", ["settled", "state"])
    op.create_index(op.f("ix_jobs_state_updated"), "jobs", ["state", "updated"])
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("claimed", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heard", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reached", sa.String(length=16), nullable=False),
        sa.Column("seen_running", sa.Boolean(), nullable=False),
        sa.Column("hypervisor", sa.String(length=16), nullable=True),
        sa.Column("exit", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("ending", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("seconds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("bytes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("cpu_seconds", sa.Double(), nullable=False),
        sa.Column("rejected", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
    )
    op.create_index(op.f("ix_attempts_job_id_number"), "attempts", ["job_id", "number"])
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason_code", sa.String(length=32), nullable=False),
        sa.Column("reason_message", sa.Text(), nullable=False),
        sa.Column("reason_actor", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_events_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "outputs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("path", sa.String(length=255), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_outputs_attempt_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outputs")),
        sa.UniqueConstraint("attempt_id", "path", name=op.f("uq_outputs_attempt_id_path")),
    )
    op.create_index(op.f("ix_outputs_digest"), "outputs", ["digest"])


def downgrade() -> None:
    """Drop the tables."""
    for name in (
        "outputs",
        "events",
        "attempts",
        "jobs",
        "submissions",
        "nodes",
        "condor_jobs",
        "builds",
        "blob_owners",
        "api_tokens",
    ):
        op.drop_table(name)
