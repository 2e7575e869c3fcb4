"""Builds the parts that run VMs, for ``vmjobs run``, ``agent``, ``doctor`` and others."""

from __future__ import annotations

import logging
from pathlib import Path

from images.cloudinit import NoCloud
from vmjobs.agent.fleet import Fleet
from vmjobs.agent.journal import Journal
from vmjobs.agent.members.journal import MemberJournal
from vmjobs.agent.members.parts import MemberParts, MemberSettings
from vmjobs.agent.members.telling import Reporter, Shipper
from vmjobs.agent.node import member_directory
from vmjobs.agent.run import Parts, RunSettings
from vmjobs.cli.support import node_name
from vmjobs.client import ShareClient
from vmjobs.config import Config
from vmjobs.errors import VMJobsError
from vmjobs.hypervisor.registry import drivers
from vmjobs.ports import ImageSource, LiveSource

log = logging.getLogger(__name__)


def fleet(settings: Config, images: ImageSource, cache: Path | None = None) -> Fleet:
    """Return the node's hypervisors, not yet probed. Probes boot cached kernels."""

    def kernels() -> list[Path]:
        found = []
        for digest in images.cached():
            try:
                found.append(images.prepare(digest).kernel)
            except (VMJobsError, OSError) as error:
                log.warning("probes cannot use the image %s: %s", digest, error)
        return [kernel for kernel in found if kernel is not None]

    return Fleet(drivers(settings, kernels), settings.probe_seconds, cache)


def parts(
    settings: Config,
    images: ImageSource,
    hypervisors: Fleet,
    runs: Path,
    live: LiveSource | None = None,
) -> Parts:
    """Return the parts that runs use."""
    return Parts(
        images=images,
        choose=hypervisors.choose,
        journal=Journal(runs),
        settings=RunSettings(
            node=node_name(settings),
            max_console=settings.max_console_bytes,
            max_log=settings.max_stream_bytes,
        ),
        seeds=NoCloud(),
        live=live,
        recheck=hypervisors.recheck,
    )


def member_journal(settings: Config) -> MemberJournal:
    """Return the journal of this node's cluster VMs."""
    return MemberJournal(member_directory(settings))


def member_parts(
    settings: Config, source: ShareClient, images: ImageSource, hypervisors: Fleet
) -> MemberParts:
    """Return the parts that cluster VMs use."""
    from condor.worker import WorkerKit  # noqa: PLC0415 - only nodes that have clusters need it

    reporter = Reporter(source)
    return MemberParts(
        images=images,
        choose=hypervisors.choose,
        drivers=hypervisors.drivers,
        journal=member_journal(settings),
        source=source,
        reporter=reporter,
        shipper=Shipper(source, reporter),
        kit=WorkerKit(),
        settings=MemberSettings(max_console=settings.max_console_bytes),
        seeds=NoCloud(),
        sessions=source,
    )
