"""Paged lists: every entry once, in order, while other entries come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert, select

from repository.db.models import NodeRow
from repository.db.paging import MAX_PAGE, PageRequest
from repository.images import Viewer
from repository.images.tables import HoldingRow, TagRow
from repository.service import Repository
from tests.kit.api_site import Site
from tests.kit.cluster_nodes import OPERATOR, POOLS, declared, node_of
from tests.kit.repository_jobs import images_of, push, push_library
from vmjobs.client import Client

pytestmark = [pytest.mark.in_process, pytest.mark.settings(pools=POOLS)]

ADA = Viewer("ada")


def fill(repository: Repository) -> None:
    """Create seven nodes and clusters; images with a name, several, none, and of the library."""
    for number in range(7):
        repository.nodes.put(node_of(f"n{number}"))
        repository.cluster_specs.apply(OPERATOR, declared(f"c{number}", image="hep"))
        push(repository, ADA, b"%d" % number, name=f"i{number % 3}", tag=f"t{number}")
    push(repository, ADA, b"nameless")
    push(repository, ADA, b"nameless, too")


LISTS = ("images", "nodes", "clusters")


def test_a_page_of_no_list_is_refused(site: Site) -> None:
    user = site.user("ada")
    long = f"cursor={'x' * 2000}"
    for query in ("limit=0", "limit=1001", "limit=x", "page=2", long, "cursor=a%00"):
        for what in LISTS:
            assert user.problem(422, "GET", f"/v1/{what}?{query}")["code"] == "INVALID_REQUEST"
    for cursor in ("x", "x:a:b:c", "::"):
        problem = user.problem(422, "GET", f"/v1/images?cursor={cursor}")
        assert problem["errors"][0]["code"] == "bad_cursor"


@pytest.mark.both_databases
def test_pages_have_everything_once_and_in_order(repository: Repository) -> None:
    fill(repository)
    lists: dict[str, Callable[[PageRequest], tuple[list[Any], str]]] = {
        "images": lambda page: repository.catalog.page(ADA, page),
        "nodes": repository.nodes.page,
        "clusters": repository.clusters.page,
    }
    for what, ask in lists.items():
        whole, last = ask(PageRequest())
        assert (len(whole) >= 7, last) == (True, ""), what
        for limit in (1, 2, 3, len(whole), 1000):
            found, cursor = ask(PageRequest(limit))
            while cursor:
                assert len(found) % limit == 0, what
                some, cursor = ask(PageRequest(limit, cursor))
                found += some
            assert found == whole, (what, limit)
    assert [i.name for i in images_of(repository, ADA)].count("") == 2


def test_clients_follow_pages(site: Site, url: str) -> None:
    image = push_library(site.repository)
    site.repository.nodes.put(node_of("n"))
    count = MAX_PAGE + 5
    with site.repository.database.write() as session:
        (node,) = session.execute(NodeRow.__table__.select()).mappings()
        names = [f"n{n:04}" for n in range(count)]
        described = [{"name": n, "description": {**node["description"], "name": n}} for n in names]
        session.execute(insert(NodeRow), [{**node, **row} for row in described])
        holding = session.scalars(select(HoldingRow.id).where(HoldingRow.image == image.digest)).one()
        tags = [
            {"namespace": "library", "name": "many", "tag": f"t{n:04}", "holding": holding}
            for n in range(count)
        ]
        session.execute(insert(TagRow), tags)
    user = site.user("ada")
    assert len(user("GET", "/v1/nodes?limit=3").get_json()["nodes"]) == 3
    with Client(url, user.token) as api:
        assert [node.name for node in api.nodes()] == ["n", *names]
        tags_seen = [entry.tag for entry in api.images() if entry.name == "many"]
        assert tags_seen == [row["tag"] for row in tags]
        assert api.clusters.list() == []
