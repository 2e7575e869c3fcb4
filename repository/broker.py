"""The message broker between API and worker: its settings, and the sending side.

Nothing here imports HTCondor code, so that API processes stay small.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from celery import Celery
from celery.exceptions import CeleryError
from kombu.exceptions import KombuError

from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import JobAction

QUEUE: Final = "vmjobs"
SUBMIT_ARRAY: Final = "vmjobs.submit_array"
CHANGE_JOBS: Final = "vmjobs.change_jobs"
CLUSTERS: Final = "vmjobs.clusters"
#: Builds of images: builders consume this queue alone, and no other worker does.
BUILD_QUEUE: Final = "vmjobs.builds"
BUILD_IMAGE: Final = "vmjobs.build_image"
#: How long publishing may take before the broker counts as down, in seconds.
CONNECT_SECONDS: Final = 3
ANSWER_SECONDS: Final = 5

#: kombu's transports may also raise errors of their own libraries: those of amqp are OSErrors or
#: carry an AMQPError; those of redis and others arrive as kombu's OperationalError.
_BROKER_ERRORS: Final = (KombuError, CeleryError, OSError)


def file_broker_folder(config: Config) -> Path:
    """The folder of the messages when no broker is configured."""
    return config.data_dir / "broker"


def broker_settings(config: Config) -> dict[str, Any]:
    """Celery settings that sender and worker must agree on."""
    settings: dict[str, Any] = {
        "task_default_queue": QUEUE,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "broker_connection_timeout": CONNECT_SECONDS,
        "enable_utc": True,
        "timezone": "UTC",
    }
    if config.broker_url:
        return {**settings, "broker_url": config.broker_url, **_tls(config)}
    folder = file_broker_folder(config)
    for part in (folder, folder / "control"):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        **settings,
        "broker_url": "memory://localhost/",
        "broker_transport": "repository.filebroker:Transport",
        "broker_transport_options": {
            "data_folder_in": str(folder),
            "data_folder_out": str(folder),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.2,
        },
    }


def _tls(config: Config) -> dict[str, Any]:
    """TLS options that verify the broker's certificate: the AMQP library does not by default."""
    if not config.broker_url.startswith("amqps:"):
        return {}
    options: dict[str, Any] = {
        "cert_reqs": ssl.CERT_REQUIRED,
        "server_hostname": urlsplit(config.broker_url).hostname,
    }
    if config.broker_ca is not None:
        options["ca_certs"] = str(config.broker_ca)
    return {"broker_use_ssl": options}


class TaskPublisher:
    """Sends tasks to the worker; raises within seconds if the broker does not take them."""

    def __init__(self, config: Config) -> None:
        self._app = Celery("vmjobs-publisher", set_as_current=False, config_source=None)
        self._app.conf.update(broker_settings(config))
        if config.broker_url:
            self._app.conf.update(
                # An idle sender answers no heartbeats, so the broker would close its connection.
                broker_heartbeat=0,
                broker_connection_retry=False,
                broker_transport_options=_sender_options(config.broker_url),
            )
        else:
            self._folder = file_broker_folder(config)

    def submit_array(self, array: str) -> None:
        """Tell the worker to submit the array's jobs to HTCondor.  Raises Unavailable("broker")."""
        self._send(SUBMIT_ARRAY, array)

    def change_jobs(self, action: JobAction, ids: Sequence[str]) -> None:
        """Tell the worker to cancel, hold or release jobs.  Raises Unavailable("broker")."""
        self._send(CHANGE_JOBS, action.value, list(ids))

    def build_image(self, build: str) -> None:
        """Tell the builders about a build.  Raises Unavailable("broker")."""
        self._send(BUILD_IMAGE, build, queue=BUILD_QUEUE)

    def clusters(self) -> None:
        """Tell the worker to reconcile virtual clusters now.  Raises Unavailable("broker")."""
        self._send(CLUSTERS)

    def ping(self) -> None:
        """Check that the broker takes messages.  Raises Unavailable("broker")."""
        with _translated():
            if self._app.conf.broker_transport:
                if not os.access(self._folder, os.W_OK | os.X_OK):
                    raise PermissionError(13, "the folder cannot be written", str(self._folder))
                return
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=CONNECT_SECONDS)

    def close(self) -> None:
        self._app.close()

    def _send(self, name: str, *arguments: str | list[str], queue: str = QUEUE) -> None:
        """Send a task; retry once over a new connection, since a pooled one may be dead.

        A message may thus arrive twice; every task can be repeated.
        """
        with _translated():
            try:
                self._publish(name, arguments, queue)
            except _BROKER_ERRORS:
                with self._app.connection_for_write() as connection:
                    self._publish(name, arguments, queue, connection)

    def _publish(
        self, name: str, arguments: tuple[str | list[str], ...], queue: str, connection: Any = None
    ) -> None:
        self._app.send_task(
            name,
            args=arguments,
            queue=queue,
            ignore_result=True,
            retry=False,
            add_to_parent=False,
            connection=connection,
        )


def _sender_options(url: str) -> dict[str, Any]:
    """Short time-outs; with AMQP also publisher confirms."""
    options: dict[str, Any] = {
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0.2,
        "interval_max": 0.2,
        "connect_retries_timeout": CONNECT_SECONDS,
    }
    if url.startswith(("amqp", "pyamqp")):
        options |= {
            "confirm_publish": True,
            "read_timeout": ANSWER_SECONDS,
            "write_timeout": ANSWER_SECONDS,
        }
    if url.startswith("redis"):
        options |= {"socket_timeout": ANSWER_SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
    return options


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _BROKER_ERRORS as error:
        raise Unavailable(
            "broker",
            f"the message broker does not answer: {error or type(error).__name__}",
            hint="nothing was stored; try again",
        ) from error
