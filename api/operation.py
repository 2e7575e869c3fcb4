"""Declares endpoints: one declaration guards a view and documents it.

An :class:`Operation` wraps a view. It decides who may call the view and becomes its part of the OpenAPI
document, so that neither can drift from the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import IO, Any, BinaryIO, Final, TypeVar, cast

from flask import g, request
from pydantic import BaseModel, ValidationError
from werkzeug.wrappers import Response

from api.problems import BrokenBody, MalformedBody, UnsupportedMediaType
from api.services import services
from api.tokens import InsufficientScope, Principal, Scope
from vmjobs.errors import Fault, Forbidden, InvalidRequest, PayloadTooLarge
from vmjobs.model import faults_of

JSON: Final = "application/json"
MAX_JSON_BYTES: Final = 8 * 1024 * 1024

View = Callable[..., Response]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class BinaryBody:
    """A body of plain bytes."""

    description: str
    media: str = "application/octet-stream"


@dataclass(frozen=True)
class Reply:
    """A possible answer: its meaning, body and headers (name to description)."""

    description: str
    body: type[BaseModel] | BinaryBody | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestHeader:
    """A request header that the endpoint uses."""

    name: str
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True)
class AccessRule:
    """Permission: one of the scopes or, with ``job``, the token of the URL's job."""

    scopes: frozenset[Scope] = frozenset()
    job: bool = False

    @property
    def public(self) -> bool:
        """Whether no token is needed."""
        return not self.scopes and not self.job

    def names(self) -> list[str]:
        """Return the names of the scopes, for documents and challenges."""
        return sorted(self.scopes) + (["vmjobs.job:{job}"] if self.job else [])


@dataclass(frozen=True)
class Operation:
    """Declares an endpoint, as a decorator of its view: its permissions, inputs and answers.

    The view's docstring has summary (first line) and description.
    """

    id: str
    _: KW_ONLY
    access: AccessRule
    replies: Mapping[int, Reply]
    body: type[BaseModel] | BinaryBody | None = None
    query: type[BaseModel] | None = None
    headers: tuple[RequestHeader, ...] = ()
    errors: tuple[int, ...] = ()

    def __call__(self, view: View) -> View:
        """Return the view, for callers with the permission only."""

        @functools.wraps(view)
        def guarded(**arguments: Any) -> Response:
            if not self.access.public:
                g.principal = services().principal(request.headers.get("Authorization"))
                require(self.access, g.principal, arguments.get("job"))
                _complete_ids(arguments, g.principal)
            return view(**arguments)

        vars(guarded)["operation"] = self
        return guarded


PUBLIC: Final = AccessRule()


def access_for(*scopes: Scope, job: bool = False) -> AccessRule:
    """Permit tokens with one of the scopes; ``job``: also that of the URL's job."""
    return AccessRule(frozenset(scopes), job)


def operation_of(view: object) -> Operation | None:
    """Return a view's declaration."""
    found = getattr(view, "operation", None)
    return found if isinstance(found, Operation) else None


# --------------------------------------------------------------------------- who asks


def _complete_ids(arguments: dict[str, Any], principal: Principal) -> None:
    """Complete the abbreviated id of a job or build in a URL.

    Raises:
        AmbiguousId: several objects that the user may see have this prefix.
    """
    if principal.job_id is not None:
        return  # a job's token is compared with the whole id
    repository, owner = services().repository, principal.subject
    if job := arguments.get("job"):
        arguments["job"] = repository.jobs.full_id(job, owner)
    if build := arguments.get("build"):
        everyone = Scope.ADMIN in principal.scopes
        arguments["build"] = repository.builds.full_id(build, None if everyone else owner)


def require(access: AccessRule, principal: Principal, job_id: str | None = None) -> None:
    """Raise Forbidden unless the token has the permission."""
    if principal.job_id is not None:
        if not access.job:
            raise InsufficientScope("a job's token does not permit this", _scope_names(access))
        if job_id is not None and principal.job_id != job_id:
            raise Forbidden("this token belongs to another job")
    elif not principal.scopes & access.scopes:
        raise InsufficientScope("the token does not permit this", _scope_names(access))


def _scope_names(access: AccessRule) -> str:
    return " ".join(sorted(access.scopes))


def caller() -> Principal:
    """Return the caller of the present request; only in guarded views."""
    principal = g.principal
    assert isinstance(principal, Principal)  # noqa: S101 - set by every guarded view
    return principal


def require_own_node(node: str) -> None:
    """Raise Forbidden unless the token is of this node."""
    if caller().subject != node:
        raise Forbidden("this token belongs to another node")


# --------------------------------------------------------------------------- what they say


def read_body(model: type[Model]) -> Model:
    """Return the request's JSON body as ``model``.

    Raises:
        UnsupportedMediaType, PayloadTooLarge, MalformedBody: the body is not acceptable JSON.
        InvalidRequest: with every fault that the model finds.
    """
    return parse_body(model, read_json())


def read_json() -> bytes:
    """Return the request's body, declared as JSON and of limited length.

    Raises:
        UnsupportedMediaType, PayloadTooLarge.
    """
    if request.mimetype != JSON:
        raise UnsupportedMediaType("the body must be JSON", hint=f"send 'Content-Type: {JSON}'")
    return read_limited(MAX_JSON_BYTES)


def parse_body(model: type[Model], data: bytes) -> Model:
    """Parse JSON as ``model``.

    Raises:
        MalformedBody: it is not JSON.
        InvalidRequest: with every fault that the model finds.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        faults = faults_of(error)
        if any(fault.code == "json_invalid" for fault in faults):
            raise MalformedBody("the body is not well-formed JSON", faults=faults) from error
        raise InvalidRequest(describe_fault_count("the body", faults), faults=faults) from error


class _RequestBody:
    """The request's body as a stream. A client that disconnects is not our failure."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except OSError as error:
            raise BrokenBody("the request body ended early") from error


def body_stream() -> BinaryIO:
    """Return the request's body as a stream.

    Reads raise BrokenBody if the client is silent or disconnects.
    """
    return cast(BinaryIO, _RequestBody(request.stream))


def read_limited(limit: int) -> bytes:
    """Return the request's body, at most ``limit`` bytes.

    Raises:
        PayloadTooLarge: there is more.
    """
    too_large = PayloadTooLarge(f"the body is larger than the limit of {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    data = body_stream().read(limit + 1)
    if len(data) > limit:
        raise too_large
    return data


def read_query(model: type[Model]) -> Model:
    """Return the query as ``model``; unknown and repeated parameters are faults.

    Raises:
        InvalidRequest: with every fault.
    """
    pairs = {k: v[0] if len(v) == 1 else v for k, v in request.args.lists()}
    try:
        return model.model_validate(pairs)
    except ValidationError as error:
        faults = faults_of(error)
        raise InvalidRequest(describe_fault_count("the query", faults), faults=faults) from error


def describe_fault_count(what: str, faults: Sequence[Fault]) -> str:
    """Return a sentence with the number of faults of ``what``."""
    return f"{what} has {len(faults)} fault{'' if len(faults) == 1 else 's'}"


# --------------------------------------------------------------------------- what we answer


def json_reply(
    model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an object as a JSON answer."""
    response = Response(model.model_dump_json(), status, content_type=JSON)
    response.headers["Cache-Control"] = "no-cache"
    response.headers.update(headers or {})
    return response


def empty_reply(status: int = 204) -> Response:
    """Return an answer without a body."""
    response = Response(status=status)
    response.headers.remove("Content-Type")
    return response
