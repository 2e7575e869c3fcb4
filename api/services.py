"""The services that views use, stored in the application instead of in globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from flask import Flask, current_app

from api.assignment_stream import AssignmentWatch
from api.session_link import SessionClient
from api.tokens import ApiTokenIssuer, Principal, bearer_token
from repository.broker import TaskPublisher
from repository.service import Repository
from repository.tokens import TokenChecker
from vmjobs.cluster.pool import PoolVm
from vmjobs.cluster.wire import PoolToken
from vmjobs.config import Config

_KEY: Final = "vmjobs"

#: Returns when the service works, raises when it does not.
HealthCheck = Callable[[], None]


class TokenIssuer(Protocol):
    """Issues pool tokens for VMs."""

    def mint(self, pool: str, vm: PoolVm, seconds: int) -> PoolToken:
        """An IDTOKEN that lets exactly this VM join the pool, and allows nothing else.

        Raises:
            Unavailable: it cannot be made now.
        """


@dataclass(frozen=True)
class Services:
    """The services that :func:`api.app.create_app` got.

    assignments: where requests wait for changes. sessions: logins to worker VMs. gate: refuses
    revoked tokens. token_issuer: issues IDTOKENs for worker VMs; None: this service issues none.
    """

    config: Config
    repository: Repository
    dispatcher: TaskPublisher
    issuer: ApiTokenIssuer
    assignments: AssignmentWatch
    sessions: SessionClient
    gate: TokenChecker
    token_issuer: TokenIssuer | None = None
    checks: Mapping[str, HealthCheck] = field(default_factory=dict)

    def principal(self, authorization: str | None) -> Principal:
        """Return the sender of this ``Authorization`` header.

        Raises:
            Unauthenticated: no token, or no valid one.
            Unavailable: the check for revocation failed.
        """
        found = self.issuer.verify(bearer_token(authorization))
        if found.job_id is None:
            self.gate.check(found.record)
        return found


def attach_services(app: Flask, parts: Services) -> None:
    """Store ``parts`` in ``app``."""
    app.extensions[_KEY] = parts


def services(app: Flask | None = None) -> Services:
    """Return the services of ``app``; None: of the present request's application."""
    parts = (app or current_app).extensions[_KEY]
    assert isinstance(parts, Services)  # noqa: S101 - attach() is the only writer
    return parts


def repository() -> Repository:
    """Return the job repository of the present request's application."""
    return services().repository
