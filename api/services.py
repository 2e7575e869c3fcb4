"""What the views stand on, kept with the application: no module state, no globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from flask import Flask, current_app

from api.session_link import Sessions
from api.share_watch import ShareWatch
from api.tokens import Issuer
from repository.images import Images
from repository.service import Repository
from vmjobs.config import Config
from vmjobs.ports import Minter

_KEY: Final = "vmjobs"

#: Returns when the service works, raises when it does not.
HealthCheck = Callable[[], None]


class Dispatcher(Protocol):
    """Hands work to the workers. All raise ``Unavailable("broker", …)``."""

    def submit_array(self, array: str) -> None:
        """Have the array's jobs submitted to a scheduler."""

    def cancel_job(self, job_id: str) -> None:
        """Have the job removed from its scheduler."""

    def build_image(self, build: str) -> None:
        """Have a builder work on the build."""

    def clusters(self) -> None:
        """Have virtual clusters looked at now."""


@dataclass(frozen=True)
class Services:
    """The collaborators that :func:`api.app.create_app` was given.

    shares: where requests wait for changes of a node's share. sessions: of who is logged in to a
    machine. minter: None: no tokens for pools are
    made here.
    """

    config: Config
    repository: Repository
    images: Images
    dispatcher: Dispatcher
    issuer: Issuer
    shares: ShareWatch
    sessions: Sessions
    minter: Minter | None = None
    checks: Mapping[str, HealthCheck] = field(default_factory=dict)


def attach(app: Flask, parts: Services) -> None:
    """Keep ``parts`` with ``app``."""
    app.extensions[_KEY] = parts


def services(app: Flask | None = None) -> Services:
    """The parts of ``app``, by default of the application that handles this request."""
    parts = (app or current_app).extensions[_KEY]
    assert isinstance(parts, Services)  # noqa: S101 - attach() is the only writer
    return parts
