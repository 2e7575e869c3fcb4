"""What the views stand on, kept with the application: no module state, no globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from flask import Flask, current_app

from api.session_link import Sessions
from api.share_watch import ShareWatch
from api.tokens import Issuer, Principal, bearer
from repository.images import Images
from repository.service import Repository
from repository.tokens import TokenGate
from vmjobs.config import Config
from vmjobs.model import JobAction
from vmjobs.ports import Minter

_KEY: Final = "vmjobs"

#: Returns when the service works, raises when it does not.
HealthCheck = Callable[[], None]


class Dispatcher(Protocol):
    """Hands work to the workers. All raise ``Unavailable("broker", …)``."""

    def submit_array(self, array: str) -> None:
        """Have the array's jobs submitted to a scheduler."""

    def change_jobs(self, action: JobAction, ids: Sequence[str]) -> None:
        """Have the scheduler cancel, hold or release jobs."""

    def build_image(self, build: str) -> None:
        """Have a builder work on the build."""

    def clusters(self) -> None:
        """Have virtual clusters looked at now."""


@dataclass(frozen=True)
class Services:
    """The collaborators that :func:`api.app.create_app` was given.

    shares: where requests wait for changes of a node's share. sessions: of who is logged in to a
    machine. gate: refuses revoked tokens. minter: None: no tokens for pools are made here.
    """

    config: Config
    repository: Repository
    images: Images
    dispatcher: Dispatcher
    issuer: Issuer
    shares: ShareWatch
    sessions: Sessions
    gate: TokenGate
    minter: Minter | None = None
    checks: Mapping[str, HealthCheck] = field(default_factory=dict)

    def principal(self, authorization: str | None) -> Principal:
        """Who sent this ``Authorization`` header.

        Raises:
            Unauthenticated: no token, or no valid one.
            Unavailable: whether it was revoked cannot be known.
        """
        found = self.issuer.verify(bearer(authorization))
        if found.job_id is None:
            self.gate.admit(found.record)
        return found


def attach(app: Flask, parts: Services) -> None:
    """Keep ``parts`` with ``app``."""
    app.extensions[_KEY] = parts


def services(app: Flask | None = None) -> Services:
    """The parts of ``app``, by default of the application that handles this request."""
    parts = (app or current_app).extensions[_KEY]
    assert isinstance(parts, Services)  # noqa: S101 - attach() is the only writer
    return parts
