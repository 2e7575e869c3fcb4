"""Problem documents: every failure yields one, and none reveals internals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flask import Flask, abort
from flask.testing import FlaskClient

from api.problems import install
from vmjobs import errors

RAISED: dict[str, Exception] = {
    "spec": errors.InvalidSpec(
        "two faults", hint="mend them", faults=[errors.Fault("cpus", "bad", "too many")]
    ),
    "who": errors.Unauthenticated("the token has expired"),
    "no": errors.Forbidden("not yours"),
    "down": errors.Unavailable("broker", "the broker does not answer"),
    "bug": KeyError("secret-password"),
    "config": errors.ConfigError("cannot read /etc/secret"),
    "base": errors.VMJobsError("secret"),
}


@pytest.fixture
def client() -> FlaskClient:
    app = Flask(__name__)
    install(app)

    @app.get("/raise/<name>")
    def fail(name: str) -> str:
        raise RAISED[name]

    @app.get("/abort/<int:status>")
    def stop(status: int) -> str:
        abort(status)

    return app.test_client()


def problem(client: FlaskClient, path: str) -> tuple[dict[str, Any], Any]:
    answer = client.get(path)
    assert answer.content_type == "application/problem+json"
    document = answer.get_json(force=True)
    assert document["status"] == answer.status_code
    assert document["type"] == f"urn:vmjobs:error:{document['code']}"
    return document, answer.headers


def test_our_errors_keep_code_hint_and_faults(client: FlaskClient) -> None:
    document, _ = problem(client, "/raise/spec")
    assert document == {
        "type": "urn:vmjobs:error:INVALID_SPEC",
        "title": "Unprocessable Content",
        "status": 422,
        "detail": "two faults",
        "code": "INVALID_SPEC",
        "hint": "mend them",
        "errors": [{"field": "cpus", "code": "bad", "message": "too many"}],
    }


def test_who_is_not_let_in_is_challenged_and_a_service_that_is_away_named(client: FlaskClient) -> None:
    for path, error in (("/raise/who", "invalid_token"), ("/raise/no", "insufficient_scope")):
        assert f'error="{error}"' in problem(client, path)[1]["WWW-Authenticate"]
    document, headers = problem(client, "/raise/down")
    assert (document["status"], document["service"]) == (503, "broker")
    assert int(headers["Retry-After"]) > 0


@pytest.mark.parametrize("name", ["bug", "config", "base"])
def test_incidents_tell_nothing_and_log_all(
    client: FlaskClient, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with caplog.at_level(logging.ERROR, logger="api.problems"):
        document, _ = problem(client, f"/raise/{name}")
    assert document["status"] == 500
    assert "secret" not in str(document)
    incident = document["instance"].removeprefix("urn:vmjobs:incident:")
    assert incident in document["detail"]
    assert incident in caplog.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/nowhere", 404, "NOT_FOUND"),
        ("/abort/400", 400, "BAD_REQUEST"),
        ("/abort/413", 413, "TOO_LARGE"),
        ("/abort/418", 418, "BAD_REQUEST"),
        ("/abort/502", 502, "INTERNAL"),
    ],
)
def test_what_http_itself_refuses(client: FlaskClient, path: str, status: int, code: str) -> None:
    document, _ = problem(client, path)
    assert (document["status"], document["code"]) == (status, code)


def test_wrong_method_names_the_right_ones(client: FlaskClient) -> None:
    answer = client.post("/raise/spec")
    assert answer.status_code == 405
    assert "GET" in answer.headers["Allow"]
    assert answer.get_json(force=True)["code"] == "METHOD_NOT_ALLOWED"
