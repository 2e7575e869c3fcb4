"""What an endpoint is: one declaration that guards the view and documents it.

:func:`operation` wraps a view. The same record decides who may call it and becomes its part of
the OpenAPI document, so that neither can drift from the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, Final, TypeVar, cast

from flask import current_app, g, request
from pydantic import BaseModel, ConfigDict, ValidationError
from werkzeug.wrappers import Response

from api.problems import BrokenBody, MalformedBody, UnsupportedMediaType
from api.services import Services, services
from api.tokens import InsufficientScope, Principal, Scope
from vmjobs.errors import Fault, Forbidden, InvalidRequest, PayloadTooLarge
from vmjobs.model import faults_of

JSON: Final = "application/json"
MAX_JSON_BYTES: Final = 8 * 1024 * 1024

View = Callable[..., Response]
Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of query parameters: what is not declared is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Binary:
    """A body of plain bytes."""

    description: str
    media: str = "application/octet-stream"


@dataclass(frozen=True)
class Reply:
    """One way to answer: what it means, its body and its headers (name to description)."""

    description: str
    body: type[BaseModel] | Binary | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """A request header that the endpoint heeds."""

    name: str
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True)
class Access:
    """Who may call: a holder of any one of the scopes or, with ``job``, of the job's own token."""

    scopes: frozenset[Scope] = frozenset()
    job: bool = False

    @property
    def public(self) -> bool:
        """True where no token is needed."""
        return not self.scopes and not self.job

    def names(self) -> list[str]:
        """The scopes by name, for documents and challenges."""
        return sorted(self.scopes) + (["vmjobs.job:{job}"] if self.job else [])


@dataclass(frozen=True)
class Operation:
    """The record of one endpoint."""

    id: str
    summary: str
    description: str
    access: Access
    replies: Mapping[int, Reply]
    body: type[BaseModel] | Binary | None
    query: type[BaseModel] | None
    headers: tuple[Header, ...]
    errors: tuple[int, ...]
    tag: str


PUBLIC: Final = Access()


def anyone_with(*scopes: Scope, job: bool = False) -> Access:
    """Access for a token with one of the scopes; ``job``: also for the job's own token."""
    return Access(frozenset(scopes), job)


def operation(
    name: str,
    *,
    tag: str,
    access: Access,
    replies: Mapping[int, Reply],
    body: type[BaseModel] | Binary | None = None,
    query: type[BaseModel] | None = None,
    headers: tuple[Header, ...] = (),
    errors: tuple[int, ...] = (),
) -> Callable[[View], View]:
    """Declare a view. Its docstring gives summary (first line) and description."""

    def declare(view: View) -> View:
        text = (view.__doc__ or name).strip()
        summary, _, rest = text.partition("\n")
        description = " ".join(rest.split())
        record = Operation(
            name, summary.rstrip("."), description, access, replies, body, query, headers, errors, tag
        )

        @functools.wraps(view)
        def guarded(**arguments: Any) -> Response:
            if not access.public:
                g.principal = authorize(access, arguments.get("job"))
                _complete_ids(arguments, g.principal)
            return view(**arguments)

        vars(guarded)["operation"] = record
        return guarded

    return declare


def operation_of(view: object) -> Operation | None:
    """The record that :func:`operation` left on a view."""
    found = getattr(view, "operation", None)
    return found if isinstance(found, Operation) else None


# --------------------------------------------------------------------------- who asks


def authorize(access: Access, job_id: str | None) -> Principal:
    """Verify the request's token and that it allows this.

    Raises:
        Unauthenticated: no token, or no valid one.
        Forbidden: a valid token of too narrow a scope.
    """
    principal = services().principal(request.headers.get("Authorization"))
    require(access, principal, job_id)
    return principal


def _complete_ids(arguments: dict[str, Any], principal: Principal) -> None:
    """Let a user shorten the id of a job or build in a URL.

    Raises:
        AmbiguousId: several of what the user may see begin with it.
    """
    if principal.job_id is not None:
        return  # a job's token is compared with the whole id
    repository, owner = services().repository, principal.subject
    if job := arguments.get("job"):
        arguments["job"] = repository.full_job_id(job, owner)
    if build := arguments.get("build"):
        everyone = Scope.ADMIN in principal.scopes
        arguments["build"] = repository.builds.full_id(build, None if everyone else owner)


def require(access: Access, principal: Principal, job_id: str | None = None) -> None:
    """Raises Forbidden unless the token allows this."""
    if principal.job_id is not None:
        if not access.job:
            raise InsufficientScope("a job's token is not good for this", _needed(access))
        if job_id is not None and principal.job_id != job_id:
            raise Forbidden("this token belongs to another job")
    elif not principal.scopes & access.scopes:
        raise InsufficientScope("the token does not carry the right to do this", _needed(access))


def _needed(access: Access) -> str:
    return " ".join(sorted(access.scopes))


def caller() -> Principal:
    """Who makes the present request; only in guarded views."""
    principal = g.principal
    assert isinstance(principal, Principal)  # noqa: S101 - set by every guarded view
    return principal


def require_own(node: str) -> None:
    """Raises Forbidden: a node's token is good for the node it was made for."""
    if caller().subject != node:
        raise Forbidden("this token belongs to another node")


def backend() -> Services:
    """What the application was made of."""
    return services(current_app)


# --------------------------------------------------------------------------- what they say


def read_body(model: type[Model]) -> Model:
    """The request's JSON body as ``model``.

    Raises:
        UnsupportedMediaType, PayloadTooLarge, MalformedBody: it is no JSON body of ours.
        InvalidRequest: with every fault that the model finds.
    """
    return parse_body(model, read_json())


def read_json() -> bytes:
    """The request's body, which says that it is JSON and is not too long.

    Raises:
        UnsupportedMediaType, PayloadTooLarge.
    """
    if request.mimetype != JSON:
        raise UnsupportedMediaType("the body must be JSON", hint=f"send 'Content-Type: {JSON}'")
    return read_limited(MAX_JSON_BYTES)


def parse_body(model: type[Model], data: bytes) -> Model:
    """JSON as ``model``.

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
        raise InvalidRequest(count_of("the body", faults), faults=faults) from error


class _Body:
    """The request's body as a source of bytes. A peer that goes away is no fault of ours."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except OSError as error:
            raise BrokenBody("the body stopped coming before its end") from error


def body_stream() -> BinaryIO:
    """The request's body, to be read piece by piece.

    Reading raises BrokenBody where the client falls silent or goes away.
    """
    return cast(BinaryIO, _Body(request.stream))


def read_limited(limit: int) -> bytes:
    """The request's body, at most ``limit`` bytes of it.

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
    """The request's query as ``model``; unknown and repeated parameters are faults.

    Raises:
        InvalidRequest: with every fault.
    """
    pairs = {k: v[0] if len(v) == 1 else v for k, v in request.args.lists()}
    try:
        return model.model_validate(pairs)
    except ValidationError as error:
        faults = faults_of(error)
        raise InvalidRequest(count_of("the query", faults), faults=faults) from error


def count_of(what: str, faults: Sequence[Fault]) -> str:
    """How many faults ``what`` has, as a sentence."""
    return f"{what} has {len(faults)} fault{'' if len(faults) == 1 else 's'}"


# --------------------------------------------------------------------------- what we answer


def json_reply(
    model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An object as a JSON answer."""
    response = Response(model.model_dump_json(), status, content_type=JSON)
    response.headers["Cache-Control"] = "no-cache"
    response.headers.update(headers or {})
    return response


def empty_reply(status: int = 204) -> Response:
    """An answer without a body."""
    response = Response(status=status)
    response.headers.remove("Content-Type")
    return response
