"""Execute nodes as they announce themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import select

from repository.db.database import Database
from repository.db.models import NodeRow
from repository.db.paging import PageRequest
from repository.db.sql import upsert
from vmjobs.errors import NotFound
from vmjobs.model import Node
from vmjobs.model import now as utc_now

#: A node without contact for longer is not alive.
LIVE_FOR: Final = timedelta(minutes=5)


@dataclass(frozen=True)
class Nodes:
    """Announcements of execute nodes."""

    database: Database

    def put(self, node: Node) -> None:
        """Store a node's announcement; ``updated`` becomes the time of arrival."""
        present = utc_now()
        description = node.model_copy(update={"updated": present}).model_dump(mode="json")
        row = {"name": node.name, "heard": present, "description": description}
        with self.database.write() as session:
            upsert(session, NodeRow, row, key=("name",), change=("heard", "description"))

    def live(self) -> list[Node]:
        """Return the nodes with contact in the last five minutes, by name."""
        query = select(NodeRow).order_by(NodeRow.name).where(NodeRow.heard >= utc_now() - LIVE_FOR)
        with self.database.read() as session:
            return [Node.model_validate(row.description) for row in session.scalars(query)]

    def page(self, page: PageRequest) -> tuple[list[Node], str]:
        """Return one page of all nodes, by name, and the cursor of the next page."""
        query = select(NodeRow).order_by(NodeRow.name).where(NodeRow.name > page.cursor)
        with self.database.read() as session:
            rows, cursor = page.cut(session.scalars(query.limit(page.rows)).all(), lambda row: row.name)
            return [Node.model_validate(row.description) for row in rows], cursor

    def get(self, name: str) -> Node:
        """One node.  Raises NotFound."""
        with self.database.read() as session:
            row = session.get(NodeRow, name) if name.isprintable() else None
            if row is None:
                raise NotFound(f"there is no node {name[:255]}")
            return Node.model_validate(row.description)
