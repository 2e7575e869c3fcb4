"""Alembic's entry point; the connection comes from :func:`repository.migrations.upgrade`."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context

from repository.clusters import tables as cluster_tables  # noqa: F401 - registers the tables
from repository.db.database import UtcDateTime
from repository.db.models import Base
from repository.images import tables  # noqa: F401


def _render(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """Render plain types, so that a migration does not change its meaning with our code."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    compare_type=True,
    compare_server_default=True,
    render_as_batch=True,
    render_item=_render,
)
with context.begin_transaction():
    context.run_migrations()
