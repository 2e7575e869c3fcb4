"""``vmjobs worker``: submits jobs to HTCondor and tracks them, or builds images."""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

import click

from vmjobs.cli.common import config
from vmjobs.cli.logs import configure_logging
from vmjobs.config import Config
from vmjobs.errors import BuildError, ConfigError, NoHypervisor, Unavailable

if TYPE_CHECKING:
    from repository.builds.build_worker import BuildContext
    from repository.jobs.dispatcher import DispatchContext
    from vmjobs.ports import Pool

log = logging.getLogger(__name__)


@click.command()
@click.option("--concurrency", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--no-beat", is_flag=True, help="Leave Celery beat to another worker.")
@click.option("--builds", is_flag=True, help="Build images, one at a time, and do nothing else.")
def worker(concurrency: int, no_beat: bool, builds: bool) -> None:
    """Submit and track jobs: a Celery worker with Celery beat.

    With --builds, build the images requested by `vmjobs image build --remote`. This needs mmdebstrap
    and a hypervisor, but neither HTCondor nor Celery beat, and does not run as root.
    """
    from repository.service import open_repository  # noqa: PLC0415 - the server's extra

    settings = config("broker_ca")
    configure_logging(settings.log_level, settings.log_format)
    if builds:
        _refuse_root()
    open_repository(settings).close()  # migrations, once
    if builds:
        _build(settings)
    else:
        _dispatch(settings, concurrency, beat=not no_beat)


def _dispatch(settings: Config, concurrency: int, *, beat: bool) -> None:
    from api.serve import make_issuer  # noqa: PLC0415
    from condor.submit.scheduler import CondorScheduler  # noqa: PLC0415
    from repository.jobs.dispatcher import DispatchContext  # noqa: PLC0415
    from repository.service import open_repository  # noqa: PLC0415
    from repository.tasks import make_celery, worker_arguments  # noqa: PLC0415

    def parts() -> DispatchContext:
        return DispatchContext(
            repository=open_repository(settings, migrate=False),
            scheduler=CondorScheduler(settings),
            issue_token=make_issuer(settings).job_token,
            pools=_pools(settings),
        )

    app = make_celery(settings, parts)
    app.worker_main(worker_arguments(settings, concurrency=concurrency, beat=beat))


def _pools(settings: Config) -> dict[str, Pool]:
    """Return the pools that virtual clusters may join, by name."""
    if not settings.pools:
        return {}
    from condor.pool.condor_pool import CondorPool  # noqa: PLC0415

    seconds = settings.pool_token_seconds
    return {
        name: CondorPool(name, settings.pool(name), token_seconds=seconds) for name in settings.pools
    }


def _refuse_root() -> None:
    """Raise ConfigError before any file is created that root would own."""
    if os.geteuid() == 0:
        raise ConfigError(
            "a builder does not run as root: scripts of the packages that users request would, too",
            hint="start it as a separate user who owns image_dir and state_dir: "
            "setpriv --reuid USER --regid GROUP --init-groups vmjobs worker --builds",
        )


def _build(settings: Config) -> None:
    from images.build.scratch_dir import remove_leftovers  # noqa: PLC0415
    from images.store.image_store import ImageStore  # noqa: PLC0415
    from node.boot_test import BootTest  # noqa: PLC0415
    from node.parts import make_hypervisors  # noqa: PLC0415
    from repository.broker import BUILD_QUEUE  # noqa: PLC0415
    from repository.builds.build_worker import BuildContext  # noqa: PLC0415
    from repository.service import open_repository  # noqa: PLC0415
    from repository.tasks import make_builder, worker_arguments  # noqa: PLC0415

    def parts() -> BuildContext:
        store = ImageStore(settings.images)
        hypervisors = make_hypervisors(settings, store)
        return BuildContext(
            repository=open_repository(settings, migrate=False),
            store=store,
            workdir=workdir,
            boot_test=lambda tell: BootTest(settings, store, tell, hypervisors),
            seconds=settings.build_seconds,
        )

    _check_builder(settings)
    workdir = settings.images.parent / "work"
    remove_leftovers(workdir)
    _requeue_builds(settings)
    app = make_builder(settings, parts)
    app.worker_main(worker_arguments(settings, concurrency=1, beat=False, queue=BUILD_QUEUE))


def _check_builder(settings: Config) -> None:
    """Raise BuildError or NoHypervisor if every build on this host would fail."""
    from images.store.image_store import ImageStore  # noqa: PLC0415
    from node.parts import make_hypervisors  # noqa: PLC0415

    if shutil.which("mmdebstrap") is None:
        raise BuildError("mmdebstrap is not installed; images cannot be built without it")
    if not any(
        result.works for result in make_hypervisors(settings, ImageStore(settings.images)).probe()
    ):
        raise NoHypervisor(
            "no hypervisor works on this host, and images must boot before they are published",
            hint="`vmjobs doctor` shows what is wrong",
        )


def _requeue_builds(settings: Config) -> None:
    """Requeue interrupted builds; a broker that redelivers messages does so, too."""
    from repository.broker import TaskPublisher  # noqa: PLC0415
    from repository.service import open_repository  # noqa: PLC0415

    repository, publisher = open_repository(settings, migrate=False), TaskPublisher(settings)
    try:
        for build in repository.builds.mark_abandoned_as_sent():
            publisher.build_image(build)
    except Unavailable as error:
        log.warning("interrupted builds wait for the periodic sweep: %s", error.message)
    finally:
        publisher.close()
        repository.close()
