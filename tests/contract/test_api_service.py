"""Nodes, and what the service reports about itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openapi_spec_validator import validate

from api.app import create_app
from api.openapi import declared, url_template
from api.operation import operation_of
from tests.kit.api_site import Site
from vmjobs import __version__
from vmjobs.errors import Unavailable

pytestmark = pytest.mark.in_process


def node(name: str = "wn1.grid", **changes: Any) -> dict[str, Any]:
    info = {"kind": "uml", "works": True, "detail": "booted", "seconds": 1.2, "version": "6.1"}
    return {
        "name": name,
        "version": __version__,
        "cpus": 8,
        "memory": 16000,
        "disk": 100000,
        "hypervisors": [info],
        "images": ["sha256:" + "1" * 64],
        "running": [],
        "updated": "2026-01-01T00:00:00Z",
        **changes,
    }


def test_node_announces_itself(site: Site) -> None:
    agent = site.caller(site.issuer.node_token("wn1.grid"))
    for _ in range(2):
        assert agent("PUT", "/v1/nodes/wn1.grid", json=node()).status_code == 200
    user = site.user()
    (listed,) = user("GET", "/v1/nodes").get_json()["nodes"]
    assert listed == user("GET", "/v1/nodes/wn1.grid").get_json()
    assert (listed["cpus"], listed["hypervisors"][0]["kind"]) == (8, "uml")
    user.problem(404, "GET", "/v1/nodes/wn2.grid")


def test_a_node_renews_its_token_in_the_second_half_of_its_life(site: Site) -> None:
    def renewed(token: str, words: str = "?renew=true") -> str:
        answer = site.caller(token)("PUT", f"/v1/nodes/wn1.grid{words}", json=node())
        assert answer.status_code == 200
        return str(answer.get_json()["token"])

    young, old = (site.node_token("wn1.grid", age, lifetime=1000) for age in (400, 600))
    assert renewed(young) == ""
    assert renewed(old, "") == ""
    before, after = site.issuer.verify(old), site.issuer.verify(renewed(old))
    assert (after.subject, after.scopes) == ("wn1.grid", before.scopes)
    assert (abs(after.issued - time.time()) < 60, after.expires - after.issued) == (True, 1000)
    assert after.token_id != before.token_id


def test_a_node_speaks_for_itself_only(site: Site) -> None:
    agent = site.caller(site.issuer.node_token("wn1.grid"))
    agent.problem(403, "PUT", "/v1/nodes/wn2.grid", json=node("wn2.grid"))
    problem = agent.problem(422, "PUT", "/v1/nodes/wn1.grid", json=node("wn2.grid"))
    assert problem["errors"][0]["field"] == "name"
    site.user("wn1.grid").problem(403, "PUT", "/v1/nodes/wn1.grid", json=node())
    agent.problem(403, "GET", "/v1/jobs")
    agent.problem(403, "POST", "/v1/jobs", json={})


def test_bad_nodes(site: Site) -> None:
    agent = site.node("wn1.grid")
    for change, field in (
        ({"cpus": 0}, "cpus"),
        ({"memory": -1}, "memory"),
        ({"hypervisors": [{"kind": "bhyve", "works": True}]}, "hypervisors.0.kind"),
        ({"images": ["latest"]}, "images.0"),
        ({"name": "a/b"}, "name"),
    ):
        problem = agent.problem(422, "PUT", "/v1/nodes/wn1.grid", json=node(**change))
        assert [fault["field"] for fault in problem["errors"]] == [field]
    for name in ("..", "-a", "a%20b", "%00"):
        assert site.user()("GET", f"/v1/nodes/{name}").status_code in {404, 422}


def test_service_info_is_public(site: Site) -> None:
    info = site.caller()("GET", "/v1/service-info").get_json()
    assert (info["version"], info["api_version"]) == (__version__, "v1")
    assert info["limits"]["cpus"] == site.config.max_cpus
    assert "script" in info["strategies"]


def test_healthy(site: Site) -> None:
    answer = site.caller()("GET", "/healthz")
    assert answer.status_code == 200
    assert answer.get_json() == {"status": "ok", "services": {"database": "ok", "storage": "ok"}}


def test_unhealthy_names_what_is_down_and_no_more(site: Site) -> None:
    def down() -> None:
        raise Unavailable("broker", "amqp://user:secret@host refuses")

    parts = {"dispatcher": site.queue, "issuer": site.issuer, "checks": {"broker": down}}
    app = create_app(site.config, site.repository, **parts)
    answer = app.test_client().get("/healthz")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    body = answer.get_json()
    assert body["status"] == "unavailable"
    assert body["services"]["database"] == "ok"
    assert "broker" in body["services"]["broker"]
    assert "secret" not in answer.text


def test_broken_database_is_named_and_nothing_else_is_told(site: Site) -> None:
    site.repository.close()
    for file in site.config.data_dir.glob("vmjobs.db*"):
        file.unlink()
    (site.config.data_dir / "vmjobs.db").write_bytes(b"this was a database " * 1000)
    answer = site.user()("GET", "/v1/jobs")
    for path in ("/v1/jobs", "/metrics"):
        problem = site.user().problem(503, "GET", path)
        assert (problem["code"], problem["service"]) == ("UNAVAILABLE", "database")
    assert int(answer.headers["Retry-After"]) > 0
    assert "SELECT" not in answer.text
    health = site.caller()("GET", "/healthz")
    assert health.status_code == 503
    assert health.get_json()["services"]["database"] == "the database does not answer"


def test_unknown_routes_and_methods(site: Site) -> None:
    user = site.user()
    assert user.problem(404, "GET", "/v2/jobs")["code"] == "NOT_FOUND"
    assert user.problem(404, "GET", "//v1/jobs")["code"] == "NOT_FOUND"
    assert user.problem(405, "PATCH", "/v1/jobs")["code"] == "METHOD_NOT_ALLOWED"


def test_the_document_is_valid_and_has_every_route_once(site: Site) -> None:
    document = site.caller()("GET", "/openapi.json").get_json()
    assert document["openapi"].startswith("3.1")
    validate(document)
    methods = {"get", "put", "post", "delete", "head", "patch"}
    written = {(p, m) for p, item in document["paths"].items() for m in item if m in methods}
    routed = {(url_template(rule), method.lower()) for rule, method, _ in declared(site.app)}
    assert written == routed
    assert all(operation_of(view) for view in site.app.view_functions.values())
    found = [op for item in document["paths"].values() for op in item.values()]
    names = [op["operationId"] for op in found]
    assert len(names) == len(set(names))
    public = {op["operationId"] for op in found if not op["security"]}
    assert public == {"getServiceInfo", "getHealth", "getOpenAPI"}
    assert all(op["summary"] and op["tags"] for op in found)


def test_guarded_routes_refuse_strangers(site: Site) -> None:
    parts = {
        "job": "0" * 32,
        "attempt": "0" * 32,
        "digest": "sha256:" + "0" * 64,
        "path": "a",
        "name": "out",
        "ref": "tiny",
        "content": "tree:" + "0" * 64,
        "segment": "0" * 64,
        "upload": "0" * 32,
        "namespace": "ada",
        "tag": "latest",
        "build": "0" * 32,
        "member": "vc-0",
        "member_id": "0" * 32,
        "session": "0" * 32,
        "action": "hold",
    }
    stranger = site.caller()
    for rule, method, record in declared(site.app):
        if not record.access.public:
            job = "htc" + "0" * 29 if "condor_job" in rule.rule else parts["job"]
            path = url_template(rule).format(**parts | {"job": job})
            assert stranger(method, path).status_code == 401, (method, path)
