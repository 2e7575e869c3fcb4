"""Owners of blobs"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
#: Submissions whose inputs are read together.
MANY = 500


def upgrade() -> None:
    """Make the table, with the inputs and outputs of jobs for their owners.

    Delete running uploads: what they asked for does not prove that their owners have the bytes.
    """
    op.execute("DELETE FROM uploads")
    _make_blocks("digest", "segment")
    owners = op.create_table(
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
    op.execute(
        "INSERT INTO blob_owners (owner, digest, size, used, touched) "
        "SELECT jobs.owner, outputs.digest, max(outputs.size), true, CURRENT_TIMESTAMP FROM outputs "
        "JOIN attempts ON attempts.id = outputs.attempt_id JOIN jobs ON jobs.id = attempts.job_id "
        "GROUP BY jobs.owner, outputs.digest"
    )
    bind = op.get_bind()
    known = {(row.owner, row.digest) for row in bind.execute(sa.select(owners))}
    for owner, digest, size in _inputs(bind):
        if (owner, digest) not in known:
            known.add((owner, digest))
            values = {"owner": owner, "digest": digest, "size": size, "used": True}
            bind.execute(owners.insert().values(**values, touched=sa.func.current_timestamp()))


def downgrade() -> None:
    """Drop the table, and keep one location for each chunk."""
    op.drop_table("blob_owners")
    op.execute(
        "DELETE FROM blocks WHERE segment <> "
        "(SELECT min(other.segment) FROM blocks AS other WHERE other.digest = blocks.digest)"
    )
    _make_blocks("digest")


def _inputs(bind: sa.Connection) -> Iterator[tuple[str, str, int]]:
    """Yield owner, digest and size of each input of each submission."""
    query = sa.text("SELECT id, owner, spec FROM submissions WHERE id > :last ORDER BY id LIMIT :many")
    last = ""
    while rows := bind.execute(query, {"last": last, "many": MANY}).all():
        last = rows[-1].id
        for row in rows:
            spec: dict[str, Any] = json.loads(row.spec) if isinstance(row.spec, str) else row.spec
            for file in spec.get("inputs", ()):
                yield row.owner, file["digest"], file["size"]


def _make_blocks(*key: str) -> None:
    """Recreate the table with its rows: SQLite cannot change a primary key."""
    op.drop_index(op.f("ix_blocks_segment"), "blocks")
    op.rename_table("blocks", "old_blocks")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE old_blocks DROP CONSTRAINT pk_blocks")
        op.execute("ALTER TABLE old_blocks DROP CONSTRAINT fk_blocks_segment")
    op.create_table(
        "blocks",
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("segment", BIG_ID, nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["segment"], ["segments.id"], name=op.f("fk_blocks_segment"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_blocks")),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO blocks SELECT digest, segment, number FROM old_blocks")
    op.drop_table("old_blocks")
    op.create_index(op.f("ix_blocks_segment"), "blocks", ["segment"])
