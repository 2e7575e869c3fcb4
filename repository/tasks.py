"""The Celery application of ``vmjobs worker``: thin tasks over ``repository.jobs.dispatcher``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from celery import Celery

from repository import filebroker
from repository.broker import (
    BUILD_IMAGE,
    BUILD_QUEUE,
    CHANGE_JOBS,
    CLUSTERS,
    QUEUE,
    SUBMIT_ARRAY,
    broker_settings,
    file_broker_folder,
)
from repository.jobs import dispatcher
from repository.jobs.dispatcher import DispatchContext
from vmjobs.config import Config
from vmjobs.errors import NotFound, Unavailable
from vmjobs.model import JobAction

if TYPE_CHECKING:
    from repository.builds.build_worker import BuildContext

logger = logging.getLogger(__name__)

#: Periodic tasks, and seconds between their runs.
PERIODIC: Final = {
    "vmjobs.track": 2.0,
    CLUSTERS: 2.0,
    "vmjobs.reconcile": 30.0,
    "vmjobs.sweep": 30.0,
    "vmjobs.collect": 3600.0,
}
#: Retries if the schedd does not answer: first wait, longest wait (seconds), attempts. The sweep
#: handles the jobs later.
BACKOFF, BACKOFF_MAX, RETRIES = 1, 120, 12
RETRY_OPTIONS: Final[Mapping[str, Any]] = {
    "autoretry_for": (Unavailable,),
    "retry_backoff": BACKOFF,
    "retry_backoff_max": BACKOFF_MAX,
    "max_retries": RETRIES,
}
#: For messages that may arrive before the commit, or whose commit may have failed.
EARLY_OPTIONS: Final = {**RETRY_OPTIONS, "autoretry_for": (Unavailable, NotFound)}

#: Makes the collaborators; called once in each worker process, at its first task.
DispatchFactory = Callable[[], DispatchContext]
BuildContextFactory = Callable[[], "BuildContext"]
_Parts = TypeVar("_Parts")


def make_celery(config: Config, factory: DispatchFactory) -> Celery:
    """Return the worker's application with its schedule; nothing is connected yet."""
    app = _new_app(config)
    app.conf.update(
        beat_schedule_filename=str(config.data_dir / "beat"),
        beat_schedule={
            name: {"task": name, "schedule": every, "options": {"expires": every, "queue": QUEUE}}
            for name, every in PERIODIC.items()
        },
    )
    _add_tasks(app, _PerProcess(factory), config)
    return app


def make_builder(config: Config, factory: BuildContextFactory) -> Celery:
    """Return the application of a builder, which only builds images."""
    app = _new_app(config)
    parts = _PerProcess(factory)

    def build_image(build: str) -> None:
        from repository.builds import build_worker  # noqa: PLC0415 - its dependencies exist on builders only

        build_worker.build_image(parts(), build)

    app.task(build_image, name=BUILD_IMAGE, shared=False, **EARLY_OPTIONS)
    return app


def _new_app(config: Config) -> Celery:
    app = Celery("vmjobs", set_as_current=False)
    app.conf.update(broker_settings(config))
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    return app


def worker_arguments(
    config: Config, *, concurrency: int = 2, beat: bool = True, queue: str = QUEUE
) -> list[str]:
    """Arguments for ``app.worker_main``; beat: run the periodic schedule in this worker."""
    arguments = [
        "worker",
        f"--loglevel={config.log_level}",
        f"--concurrency={concurrency}",
        f"--queues={queue}",
        "--without-gossip",
        "--without-mingle",
    ]
    return [*arguments, "--beat"] if beat else arguments


class _PerProcess(Generic[_Parts]):
    """Creates the collaborators once for each process: connections must not survive a fork."""

    def __init__(self, factory: Callable[[], _Parts]) -> None:
        self._factory = factory
        self._lock = threading.Lock()
        self._made: tuple[int, _Parts] | None = None

    def __call__(self) -> _Parts:
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = (os.getpid(), self._factory())
            return self._made[1]


def _add_tasks(app: Celery, parts: _PerProcess[DispatchContext], config: Config) -> None:
    def submit_array(array: str) -> None:
        dispatcher.submit_array(parts(), array)

    def change_jobs(action: str, ids: list[str]) -> None:
        dispatcher.change_jobs(parts(), JobAction(action), ids)

    app.task(submit_array, name=SUBMIT_ARRAY, shared=False, **EARLY_OPTIONS)
    app.task(change_jobs, name=CHANGE_JOBS, shared=False, **RETRY_OPTIONS)

    def sweep(parts: DispatchContext) -> None:
        if not config.broker_url:
            filebroker.clean(file_broker_folder(config))
        for build in parts.repository.builds.mark_overdue_as_sent():
            app.send_task(BUILD_IMAGE, args=(build,), queue=BUILD_QUEUE, ignore_result=True)
        dispatcher.sweep(parts)

    for name, work in (
        ("vmjobs.track", dispatcher.track),
        (CLUSTERS, lambda parts: parts.repository.reconciler.reconcile(parts.pools)),
        ("vmjobs.reconcile", dispatcher.reconcile),
        ("vmjobs.sweep", sweep),
        ("vmjobs.collect", lambda parts: parts.repository.garbage_collector.collect()),
    ):
        app.task(_periodic(name, work, parts), name=name, shared=False)


def _periodic(
    name: str, work: Callable[[DispatchContext], None], parts: _PerProcess[DispatchContext]
) -> Callable[[], None]:
    """Return a task that skips its run while an earlier run still works, in any process."""

    def run() -> None:
        try:
            with parts().repository.database.exclusive(name) as alone:
                if alone:
                    work(parts())
        except Unavailable as error:
            logger.warning("%s waits for its next run: %s", name, error.message)

    run.__name__ = name.rpartition(".")[2]
    return run
