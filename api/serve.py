"""``vmjobs serve``: the API under gunicorn, in several processes of several threads."""

from __future__ import annotations

import logging
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from flask import Flask
from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger

from api.app import create_app
from api.services import TokenIssuer
from api.tokens import make_issuer
from api.worker import ApiWorker
from repository.broker import TaskPublisher
from repository.service import open_repository
from vmjobs.config import Config

log = logging.getLogger(__name__)

#: A third of them may wait for changes of assignments: each node has one such request, which costs no
#: more than its thread's stack. So each process can notify 16 nodes of a change at once. Another third
#: may wait for bytes of login sessions.
THREADS: Final = 48
#: Seconds after SIGTERM in which running requests may finish.
GRACEFUL_SECONDS: Final = 30
#: A peer that is silent during a request, or does not read an answer, for so long is disconnected.
STALL_SECONDS: Final = 60
KEEPALIVE_SECONDS: Final = 15
#: Permits a token of full size in a header, and a path of full size in a request line.
MAX_LINE: Final = 8190


def make_app(config: Config) -> Flask:
    """Create the API with the real services behind it. The database must be up to date.

    Raises:
        ConfigError: a setting does not fit the installation.
    """
    publisher = TaskPublisher(config)
    repository = open_repository(config, migrate=False)
    return create_app(
        config,
        repository,
        dispatcher=publisher,
        issuer=make_issuer(config),
        checks={"broker": publisher.ping},
        token_issuer=_token_issuer(config),
        max_waiting_requests=THREADS // 3,
    )


def _token_issuer(config: Config) -> TokenIssuer | None:
    """Return the issuer of IDTOKENs for worker VMs, if this service has the keys."""
    if config.pool_key_dir is None:
        return None
    from condor.pool.tokens import CondorTokenIssuer  # noqa: PLC0415 - only if it is used

    return CondorTokenIssuer(
        config.pool_key_dir, {name: config.pool(name).trust_domain for name in config.pools}
    )


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; running requests are finished first.

    Raises:
        Unavailable: the database cannot be reached, and so not be migrated.
        ConfigError: a setting does not fit the installation.
    """
    # Before the first worker starts: workers would race each other, and all die of one fault.
    open_repository(config, migrate=True).close()
    make_issuer(config)
    log.info("serving on %s with %d processes", config.listen, config.api_workers)
    GunicornServer(settings(config), lambda: make_app(config)).run()


def settings(config: Config) -> dict[str, Any]:
    """Return gunicorn's settings."""
    return {
        "bind": config.listen,
        "workers": config.api_workers,
        "worker_class": ApiWorker,
        "threads": THREADS,
        "keepalive": KEEPALIVE_SECONDS,
        "graceful_timeout": GRACEFUL_SECONDS,
        "timeout": STALL_SECONDS,
        "limit_request_line": MAX_LINE,
        "limit_request_field_size": MAX_LINE + len("Authorization: Bearer "),
        "limit_request_fields": 64,
        # Requests are not logged: their paths contain names of users' files.
        "accesslog": None,
        "logger_class": GunicornLogger,
        "loglevel": "warning" if config.log_level == "INFO" else config.log_level.lower(),
        "proc_name": "vmjobs serve",
        "worker_tmp_dir": _memory_directory(),
        "when_ready": _set_socket_timeouts,
        # Newer releases offer remote control over a socket in the user's home.
        "control_socket_disable": True,
    }


def _memory_directory() -> str:
    """Directory of the workers' heartbeat files: in memory, as a disk may be slow."""
    shared = Path("/dev/shm")  # noqa: S108 - gunicorn makes its files there safely
    return str(shared) if shared.is_dir() else tempfile.gettempdir()


def _set_socket_timeouts(server: Any) -> None:
    """Set timeouts on the listening sockets, for every connection (Linux)."""
    limit = struct.pack("ll", STALL_SECONDS, 0)
    for listener in server.LISTENERS:
        # The other two do not end sendfile, which waits for space again; this ends the connection.
        listener.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_SECONDS * 1000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            listener.sock.setsockopt(socket.SOL_SOCKET, option, limit)


class GunicornLogger(Logger):  # type: ignore[misc]
    """Sends gunicorn's own log lines to the common log."""

    def setup(self, cfg: Any) -> None:
        """Take the level from the settings, and install no handlers."""
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


class GunicornServer(BaseApplication):  # type: ignore[misc]
    """Gunicorn with these settings alone: no command line, files or environment."""

    def __init__(self, options: dict[str, Any], make: Callable[[], Flask]) -> None:
        self._options = options
        self._make = make
        super().__init__()

    def load_config(self) -> None:
        """Set the settings that this release of gunicorn has."""
        for name, value in self._options.items():
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Flask:
        """Create the application; called in each worker process, after the fork."""
        return self._make()
