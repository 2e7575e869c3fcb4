"""``vmjobs worker --builds``: builds images for the service."""

from __future__ import annotations

import logging
import os
import shutil

from images.build.scratch_dir import remove_leftovers
from images.store.image_store import ImageStore
from node.boot_test import BootTest
from node.parts import make_hypervisors
from repository.broker import BUILD_QUEUE, TaskPublisher
from repository.builds.build_worker import BuildContext
from repository.service import open_repository
from repository.tasks import make_builder, worker_arguments
from vmjobs.config import Config
from vmjobs.errors import BuildError, ConfigError, NoHypervisor, Unavailable

log = logging.getLogger(__name__)


def run_builder(settings: Config) -> None:
    """Build requested images until a signal stops the process.

    Raises:
        ConfigError: the process runs as root. BuildError, NoHypervisor: every build would fail here.
    """
    _refuse_root()
    open_repository(settings).close()  # migrations, once
    _check_builder(settings)
    workdir = settings.images.parent / "work"

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

    remove_leftovers(workdir)
    _requeue_builds(settings)
    app = make_builder(settings, parts)
    app.worker_main(worker_arguments(settings, concurrency=1, beat=False, queue=BUILD_QUEUE))


def _refuse_root() -> None:
    """Raise ConfigError before any file is created that root would own."""
    if os.geteuid() == 0:
        raise ConfigError(
            "a builder does not run as root: scripts of the packages that users request would, too",
            hint="start it as a separate user who owns image_dir and state_dir: "
            "setpriv --reuid USER --regid GROUP --init-groups vmjobs worker --builds",
        )


def _check_builder(settings: Config) -> None:
    """Raise BuildError or NoHypervisor if every build on this host would fail."""
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
    repository, publisher = open_repository(settings, migrate=False), TaskPublisher(settings)
    try:
        for build in repository.builds.mark_abandoned_as_sent():
            publisher.build_image(build)
    except Unavailable as error:
        log.warning("interrupted builds wait for the periodic sweep: %s", error.message)
    finally:
        publisher.close()
        repository.close()
