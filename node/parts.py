"""Builds the parts that run VMs, for ``vmjobs run``, ``agent``, ``doctor`` and others."""

from __future__ import annotations

import logging
import platform
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

from images.cloudinit import write_seed
from vmjobs.agent.hypervisor_registry import HypervisorRegistry
from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.journal import Journal
from vmjobs.agent.run.job_run import execute
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunServices, RunSettings
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.vm.events import EventQueue
from vmjobs.config import Config
from vmjobs.errors import VMJobsError
from vmjobs.hypervisor.registry import drivers
from vmjobs.local import LocalJob
from vmjobs.model import Report

log = logging.getLogger(__name__)


def node_name(settings: Config) -> str:
    return settings.node_name or socket.getfqdn()


def make_hypervisors(
    settings: Config, images: ImageSource, cache: Path | None = None
) -> HypervisorRegistry:
    """Return the node's hypervisors, not yet probed. Probes boot cached kernels."""

    def kernels() -> list[Path]:
        found = []
        for digest in images.cached():
            try:
                image = images.prepare(digest)
            except (VMJobsError, OSError) as error:
                log.warning("probes cannot use the image %s: %s", digest, error)
                continue
            if image.kernel is not None and image.architecture in {"", platform.machine()}:
                found.append(image.kernel)
        return found

    return HypervisorRegistry(drivers(settings, kernels), settings.probe_seconds, cache)


def make_run_parts(
    settings: Config,
    images: ImageSource,
    hypervisors: HypervisorRegistry,
    runs: Path,
) -> RunServices:
    return RunServices(
        images=images,
        choose=hypervisors.choose,
        journal=Journal(runs),
        settings=RunSettings(
            node=node_name(settings),
            max_console=settings.max_console_bytes,
            max_log=settings.max_stream_bytes,
        ),
        write_seed=write_seed,
        reprobe=hypervisors.reprobe,
    )


def run_locally(
    services: RunServices,
    job: LocalJob,
    events: EventQueue,
    on_report: Callable[[Report], object] = lambda _report: None,
) -> RunOutcome:
    """Run a job on this host to its end. events: end it early. on_report: gets its reports."""
    attempt = uuid.uuid4().hex
    return execute(Run(RunRequest(job, on_report, services, job.job_id, attempt, events)))
