"""Prefetching: images that nodes fetch before a job needs them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select

from repository.db.database import Database
from repository.db.models import NodeRow
from repository.db.sql import add_missing
from repository.images.access import holding_of
from repository.images.holdings import lock_image
from repository.images.permissions import Viewer
from repository.images.tables import PrefetchRow
from vmjobs.errors import NotFound
from vmjobs.model import Node
from vmjobs.wire import NodeWishes, PrefetchRequest, PrefetchState


@dataclass(frozen=True)
class Prefetcher:
    """Requests to nodes to fetch images."""

    database: Database

    def request(self, viewer: Viewer, digest: str, wish: PrefetchRequest) -> PrefetchState:
        """Ask nodes to fetch an image when they are idle: the named nodes, or all of a site.

        The result covers all nodes, including those asked earlier.
        Raises NotFound: no such image, or no node of that name or site.
        """
        with self.database.write() as session:
            lock_image(session, digest)
            holding_of(session, viewer, digest)
            nodes = [Node.model_validate(row.description) for row in session.scalars(select(NodeRow))]
            chosen = _choose_nodes(nodes, wish)
            cached = sorted(node.name for node in nodes if digest in node.images)
            rows = [{"node": name, "image": digest} for name in sorted(chosen - set(cached))]
            add_missing(session, PrefetchRow, rows)
            asked = select(PrefetchRow.node).where(PrefetchRow.image == digest)
            wanted = sorted(set(session.scalars(asked)) - set(cached))
        return PrefetchState(wanted=tuple(wanted), cached=tuple(cached))

    def wishes(self, node: Node) -> NodeWishes:
        """Return the images that a node has to fetch; delete requests for images that it has."""
        with self.database.read() as session:
            query = select(PrefetchRow.image).where(PrefetchRow.node == node.name)
            asked = set(session.scalars(query))
        done = asked & set(node.images)
        if done:
            with self.database.write() as session:
                here = (PrefetchRow.node == node.name, PrefetchRow.image.in_(sorted(done)))
                session.execute(delete(PrefetchRow).where(*here))
        return NodeWishes(prefetch=tuple(sorted(asked - done)))


def _choose_nodes(nodes: list[Node], wish: PrefetchRequest) -> set[str]:
    known = {node.name for node in nodes}
    strange = sorted(set(wish.nodes) - known)
    if strange:
        raise NotFound(f"there is no node {strange[0]}")
    found = set(wish.nodes) or {node.name for node in nodes if node.site == wish.site}
    if not found:
        raise NotFound(f"there is no node of the site {wish.site!r}")
    return found
