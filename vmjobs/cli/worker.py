"""``vmjobs worker``: takes jobs to HTCondor and hears what becomes of them."""

from __future__ import annotations

import click

from vmjobs.cli.main import configure_logging
from vmjobs.cli.support import config


@click.command()
@click.option("--concurrency", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--no-beat", is_flag=True, help="Leave the clock to another worker.")
def worker(concurrency: int, no_beat: bool) -> None:
    """Submit and track jobs: a Celery worker with its clock."""
    from api.serve import make_issuer  # noqa: PLC0415 - the server's extra
    from condor.scheduler import CondorScheduler  # noqa: PLC0415
    from repository.dispatch import Dispatch  # noqa: PLC0415
    from repository.service import open_repository  # noqa: PLC0415
    from repository.tasks import make_celery, worker_arguments  # noqa: PLC0415

    settings = config()
    configure_logging(settings.log_level)
    open_repository(settings).close()  # migrations, once

    def parts() -> Dispatch:
        return Dispatch(
            repository=open_repository(settings, migrate=False),
            scheduler=CondorScheduler(settings),
            mint=make_issuer(settings).job_token,
        )

    app = make_celery(settings, parts)
    app.worker_main(worker_arguments(settings, concurrency=concurrency, beat=not no_beat))
