"""``vmjobs worker``: submits jobs to HTCondor and tracks them, or builds images."""

from __future__ import annotations

import click

from api.tokens import make_issuer
from repository.jobs.dispatcher import DispatchContext
from repository.service import open_repository
from repository.tasks import make_celery, worker_arguments
from vmjobs.cli.common import config
from vmjobs.cli.logs import configure_logging
from vmjobs.config import Config


@click.command()
@click.option("--concurrency", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--no-beat", is_flag=True, help="Leave Celery beat to another worker.")
@click.option("--builds", is_flag=True, help="Build images, one at a time, and do nothing else.")
def worker(concurrency: int, no_beat: bool, builds: bool) -> None:
    """Submit and track jobs: a Celery worker with Celery beat.

    With --builds, build the images requested by `vmjobs image build --remote`. This needs mmdebstrap
    and a hypervisor, but neither HTCondor nor Celery beat, and does not run as root.
    """
    settings = config("broker_ca")
    configure_logging(settings.log_level, settings.log_format)
    if builds:
        from api.cli.builder import run_builder  # noqa: PLC0415 - needs the agent's libraries

        run_builder(settings)
    else:
        open_repository(settings).close()  # migrations, once
        _dispatch(settings, concurrency, beat=not no_beat)


def _dispatch(settings: Config, concurrency: int, *, beat: bool) -> None:
    # A builder has no HTCondor.
    from condor.pool.condor_pool import CondorPool  # noqa: PLC0415
    from condor.submit.scheduler import CondorScheduler  # noqa: PLC0415

    def parts() -> DispatchContext:
        seconds = settings.pool_token_seconds
        return DispatchContext(
            repository=open_repository(settings, migrate=False),
            scheduler=CondorScheduler(settings),
            issue_token=make_issuer(settings).job_token,
            pools={
                name: CondorPool(name, settings.pool(name), token_seconds=seconds)
                for name in settings.pools
            },
        )

    app = make_celery(settings, parts)
    app.worker_main(worker_arguments(settings, concurrency=concurrency, beat=beat))
