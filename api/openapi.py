"""The OpenAPI 3.1 document, from the URL map and the views' own declarations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from flask import Flask
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from werkzeug.routing import Rule

from api.operation import JSON, BinaryBody, Operation, Reply, operation_of
from api.problems import CONTENT_TYPE, title
from api.tokens import Scope
from vmjobs import __version__
from vmjobs.wire import Problem

REF: Final = "#/components/schemas/{model}"
_PART: Final = re.compile(r"<(?:[^:<>]+:)?([^<>]+)>")
_RETRY: Final = {"Retry-After": "seconds to wait before trying again"}
_ALWAYS: Final = (500, 503)
#: Operations are tagged with their blueprint's name; these blueprints share another one's tag.
_TAGS: Final = {
    "condor_jobs": "attempts",
    "image_bytes": "images",
    "job_sets": "jobs",
    "metrics": "service",
}

_Keys = dict[tuple[type[BaseModel], JsonSchemaMode], dict[str, Any]]


def build(app: Flask) -> dict[str, Any]:
    """Return the document for all routes of ``app``.

    Raises:
        ValueError: a route has no declaration.
    """
    routes = list(declared(app))
    schemas, components = _schemas([record for _, _, record in routes])
    paths: dict[str, dict[str, Any]] = {}
    for rule, method, record in routes:
        item = paths.setdefault(url_template(rule), {})
        view = app.view_functions[rule.endpoint]
        item[method.lower()] = _operation(rule, view.__doc__ or record.id, record, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vmjobs",
            "version": __version__,
            "summary": "Runs grid jobs in virtual machines",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": components,
            "responses": {"Problem": _problem()},
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "WLCG profile; scopes: " + ", ".join(Scope) + ", vmjobs.job:ID",
                }
            },
        },
    }


def declared(app: Flask) -> Iterator[tuple[Rule, str, Operation]]:
    """Yield every route, with each method it implements, and its declaration."""
    for rule in app.url_map.iter_rules():
        view = app.view_functions[rule.endpoint]
        record = operation_of(view)
        if record is None:
            raise ValueError(f"the route {rule.rule} has no declaration")
        methods = set(rule.methods or ()) - {"OPTIONS"}
        # HTTP answers HEAD wherever it answers GET.
        for method in sorted(methods - {"HEAD"} if "GET" in methods else methods):
            yield rule, method, record


def url_template(rule: Rule) -> str:
    """Return a rule's URL with its variable parts in braces."""
    return _PART.sub(r"{\1}", rule.rule)


def _schemas(records: list[Operation]) -> tuple[_Keys, dict[str, Any]]:
    wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(Problem, "serialization"): None}
    for record in records:
        if isinstance(record.body, type):
            wanted[record.body, "validation"] = None
        for reply in record.replies.values():
            if isinstance(reply.body, type):
                wanted[reply.body, "serialization"] = None
    found, definitions = models_json_schema(list(wanted), ref_template=REF)
    # Narrower than pydantic's own annotation: all inputs were models.
    return cast(_Keys, found), dict(sorted(definitions["$defs"].items()))


def _operation(rule: Rule, text: str, record: Operation, schemas: _Keys) -> dict[str, Any]:
    blueprint = rule.endpoint.partition(".")[0]
    summary, _, rest = text.strip().partition("\n")
    found: dict[str, Any] = {
        "operationId": record.id,
        "summary": summary.rstrip("."),
        "tags": [_TAGS.get(blueprint, blueprint)],
        "parameters": [*_path_parameters(rule), *_query_parameters(record), *_headers(record)],
        "responses": _responses(record, schemas),
        # Alternatives: one of them is enough.
        "security": [{"bearer": [name]} for name in record.access.names()],
    }
    if description := " ".join(rest.split()):
        found["description"] = description
    if record.access.job:
        found["x-job-token"] = "the token of this job is accepted here"
    if record.body is not None:
        found["requestBody"] = {
            "required": True,
            "content": _content(record.body, "validation", schemas),
        }
    return found


def _path_parameters(rule: Rule) -> Iterator[dict[str, Any]]:
    for name in _PART.findall(rule.rule):
        converter = rule._converters[name]
        schema = dict(getattr(converter, "schema", lambda: {"type": "string"})())
        description = schema.pop("description", "")
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": description,
            "schema": schema,
        }


def _query_parameters(record: Operation) -> Iterator[dict[str, Any]]:
    if record.query is None:
        return
    schema = record.query.model_json_schema()
    definitions = schema.get("$defs", {})
    for name, field in schema.get("properties", {}).items():
        shape = _resolve_references({k: v for k, v in field.items() if k != "title"}, definitions)
        parameter = {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "description": shape.pop("description", ""),
            "schema": shape,
        }
        if shape.get("type") == "array":
            parameter |= {"style": "form", "explode": False}
        yield parameter


def _resolve_references(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return dict(definitions[schema["$ref"].rsplit("/", 1)[1]])
        return {key: _resolve_references(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_resolve_references(value, definitions) for value in schema]
    return schema


def _headers(record: Operation) -> Iterator[dict[str, Any]]:
    for header in record.headers:
        yield {
            "name": header.name,
            "in": "header",
            "required": False,
            "description": header.description,
            "schema": dict(header.schema),
        }


def _responses(record: Operation, schemas: _Keys) -> dict[str, Any]:
    answers = {str(code): _reply(reply, schemas) for code, reply in record.replies.items()}
    for status in sorted(_error_statuses(record)):
        answers.setdefault(str(status), {"$ref": "#/components/responses/Problem"})
    return dict(sorted(answers.items()))


def _error_statuses(record: Operation) -> set[int]:
    statuses = {*record.errors, *_ALWAYS}
    if not record.access.public:
        statuses |= {401, 403}
    if record.query is not None:
        statuses.add(422)
    if isinstance(record.body, type):
        statuses |= {400, 413, 415, 422}
    return statuses


def _reply(reply: Reply, schemas: _Keys) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": reply.description}
    if reply.headers:
        answer["headers"] = _header_descriptions(reply.headers)
    if reply.body is not None:
        answer["content"] = _content(reply.body, "serialization", schemas)
    return answer


def _header_descriptions(headers: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}


def _content(
    body: type[BaseModel] | BinaryBody, mode: JsonSchemaMode, schemas: _Keys
) -> dict[str, Any]:
    if isinstance(body, BinaryBody):
        return {body.media: {"schema": {"type": "string", "contentMediaType": body.media}}}
    return {JSON: {"schema": schemas[body, mode]}}


def _problem() -> dict[str, Any]:
    statuses = (400, 401, 403, 404, 409, 411, 413, 415, 416, 422, 500, 502, 503, 507)
    names = ", ".join(f"{status} {title(status)}" for status in statuses)
    return {
        "description": f"A problem document (RFC 9457). The status is one of: {names}.",
        "headers": _header_descriptions(
            _RETRY | {"WWW-Authenticate": "how to authenticate (401, 403)"}
        ),
        "content": {CONTENT_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}},
    }
