"""``vmjobs agent``: the only process on an execute node that controls its VMs."""

from __future__ import annotations

import logging
import os
import pwd
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from condor.worker import WorkerKit
from images.cache.node_cache import ImageCache, SignatureCheck
from images.cloudinit import write_seed
from images.store.image_store import ImageStore
from images.transfer.file_transfer import ChunkedFileTransfer
from node.checkpoint_stores import RETRIES, ServiceCheckpointStores
from node.parts import make_hypervisors, make_run_parts, node_name
from vmjobs.agent import node as this_node
from vmjobs.agent.background import start_thread
from vmjobs.agent.checks import NodeChecks
from vmjobs.agent.cluster_vms.journal import ClusterVmJournal
from vmjobs.agent.cluster_vms.reconciler import running_reconciler
from vmjobs.agent.cluster_vms.services import ClusterVmServices, ClusterVmSettings
from vmjobs.agent.cluster_vms.status_reporter import ConsoleUploader, StatusReporter
from vmjobs.agent.condor_job import condor_job
from vmjobs.agent.condor_job.services import CondorJobServices
from vmjobs.agent.condor_job.starter import find_starter
from vmjobs.agent.hypervisor_registry import HypervisorRegistry
from vmjobs.agent.image_names import ImageNames
from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.job_runner import JobRunner
from vmjobs.agent.job_source import JobSource
from vmjobs.agent.journal import sweep, sweep_probes
from vmjobs.agent.listener import listening
from vmjobs.agent.metrics import AgentMetrics
from vmjobs.agent.metrics import serving as serving_metrics
from vmjobs.agent.node_token import NodeToken
from vmjobs.agent.prefetch import Prefetcher
from vmjobs.agent.server import Agent
from vmjobs.cli.common import config, read_token
from vmjobs.cli.logs import configure_logging
from vmjobs.client import AssignmentClient, ImageClient, Images, JobAgentClient, NodeClient
from vmjobs.config import Config
from vmjobs.errors import ConfigError, NoHypervisor, NotFound
from vmjobs.file_lock import file_lock
from vmjobs.hypervisor.libvirt import nbd_server
from vmjobs.model import MIB, Node
from vmjobs.wire import NodeWishes, Visibility

log = logging.getLogger(__name__)

#: Seconds that a stopping agent waits for its VMs to end.
STOP_SECONDS = 20.0
#: Seconds until a hypervisor that worked before is probed again while another one works.
PROBE_AGAIN_SECONDS = 300.0


@click.command()
def agent() -> None:
    """Run jobs for HTCondor on this node until a signal stops the agent.

    Jobs come from `vmjobs exec` over a Unix socket. The agent removes what an earlier agent left
    behind before it opens the socket.

    Cluster VMs keep running when the agent stops; the next agent takes them over. To remove them,
    drain or delete their clusters, or start the agent with VMJOBS_CLUSTER_MEMORY=0.
    """
    settings = config("agent_token_file")
    configure_logging(settings.log_level, settings.log_format)
    directory = settings.state_dir
    directory.mkdir(parents=True, exist_ok=True)
    # Agents clean up what they find there.
    taken = ConfigError(f"state_dir: another agent already uses {directory}")
    with file_lock(directory / "agent.lock", taken):
        _serve(settings)


def _serve(settings: Config) -> None:
    images = _image_source(settings)
    hypervisors = make_hypervisors(settings, images)
    metrics = _make_metrics(images, hypervisors)
    components = make_run_parts(settings, images, hypervisors, settings.state_dir / "runs")
    components = replace(
        components, on_step_timed=metrics.job_step, file_transfer=ChunkedFileTransfer()
    )
    leftovers = components.journal.recover(hypervisors.drivers)
    swept = sweep(components.journal, hypervisors.drivers) + sweep_probes(hypervisors.drivers)
    log.info("removed %d interrupted runs and %d unknown VMs", len(leftovers), len(swept))
    _require_hypervisor(hypervisors, has_cluster_vms=_cluster_vm_journal(settings).has_records())

    names = ImageNames(partial(_resolve, settings, images))

    def describe(running: tuple[str, ...]) -> Node:
        name, cached = node_name(settings), _cached_digests(images)
        found = hypervisors.results
        return this_node.describe(name, settings, found, cached, running, names.names_of(cached))

    def open_job(job_id: str, token: str) -> JobSource:
        return JobAgentClient(settings.api_url, token, job_id, retries=RETRIES)

    condor_jobs = _condor_job_services(settings, names.resolve)
    condor_job.remove_leftovers(condor_jobs.spool)
    checks = NodeChecks(settings.state_dir, _image_directory(settings), settings.job_users)
    runner = JobRunner(components, open_job, condor_jobs)
    runner.keep_interrupted_runs(leftovers)
    service = Agent(runner, describe, checks.faults)
    hypervisors.on_loss = runner.health.on_rest = checks.on_change = service.notify_subscribers
    metrics.jobs, metrics.faults = runner.active.states, service.faults
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # condor_master sends SIGHUP when it is reconfigured; the agent has nothing to reload.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with (
        serving_metrics(metrics.registry, settings.metrics_listen),
        _run_cluster_vms(settings, images, hypervisors, metrics),
        listening(settings.socket, service.serve),
    ):
        log.info("ready at %s", settings.socket)
        start_thread("hypervisors", _watch_hypervisors, images, hypervisors, stop)
        with _announce_node(settings, images, service.node, checks):
            stop.wait()
        service.stop(STOP_SECONDS)
    if isinstance(images, ImageCache):
        images.close()


def _resolve(settings: Config, images: ImageSource, ref: str) -> str:
    """Resolve the name of a public image to its digest."""
    if isinstance(images, ImageStore):
        return images.resolve(ref)
    token = read_token(settings.agent_token_file) if settings.agent_token_file else ""
    with Images(settings.api_url, token, retries=RETRIES) as client:
        found = client.detail(ref)
    if found.visibility is not Visibility.PUBLIC:
        raise NotFound(f'image "{ref}": no public image has this name')
    return found.digest


def _condor_job_services(settings: Config, resolve: Callable[[str], str]) -> CondorJobServices:
    """Build the services for transparent jobs. resolve: see ``CondorJobServices``."""
    trusted = {0, os.getuid()}
    with suppress(KeyError):
        trusted.add(pwd.getpwnam(settings.condor_user).pw_uid)
    memory = settings.node_memory or this_node.memory_mib()
    slot_of = partial(find_starter, trusted=trusted)
    stores = None if settings.agent_token_file is None else ServiceCheckpointStores(settings)
    return CondorJobServices(settings.state_dir / "handed", memory, resolve, slot_of, stores)


def _make_metrics(images: ImageSource, hypervisors: HypervisorRegistry) -> AgentMetrics:
    metrics = AgentMetrics()
    metrics.probes = lambda: hypervisors.results
    metrics.cache = images if isinstance(images, ImageCache) else None
    return metrics


@contextmanager
def _run_cluster_vms(
    settings: Config, images: ImageSource, hypervisors: HypervisorRegistry, metrics: AgentMetrics
) -> Iterator[None]:
    """Run this node's cluster VMs; remove them if it offers no memory to clusters."""
    if settings.agent_token_file is None or settings.cluster_memory == 0:
        journal = _cluster_vm_journal(settings)
        if count := journal.clear(hypervisors.drivers):
            log.warning("removed %d cluster VMs: this node offers no memory to clusters", count)
        yield
        return
    token = partial(read_token, settings.agent_token_file)
    source = AssignmentClient(settings.api_url, token, node_name(settings))
    components = _make_cluster_vm_parts(settings, source, images, hypervisors)
    components.reporter.on_change, metrics.members = metrics.member, components.reporter.known
    with running_reconciler(components):
        yield
    source.close()


def _cluster_vm_journal(settings: Config) -> ClusterVmJournal:
    return ClusterVmJournal(this_node.cluster_vm_directory(settings))


def _make_cluster_vm_parts(
    settings: Config, source: AssignmentClient, images: ImageSource, hypervisors: HypervisorRegistry
) -> ClusterVmServices:
    reporter = StatusReporter(source)
    return ClusterVmServices(
        images=images,
        choose=hypervisors.choose,
        drivers=hypervisors.drivers,
        journal=_cluster_vm_journal(settings),
        source=source,
        reporter=reporter,
        console_uploader=ConsoleUploader(source, reporter),
        kit=WorkerKit(),
        settings=ClusterVmSettings(max_console=settings.max_console_bytes),
        write_seed=write_seed,
        sessions=source,
    )


@contextmanager
def _announce_node(
    settings: Config, images: ImageSource, describe: Callable[[], Node], checks: NodeChecks
) -> Iterator[None]:
    """Announce this node to the API and prefetch the images that the API asks for."""
    if settings.agent_token_file is None:
        yield
        return
    registry = _RenewingNodeRegistry(settings.api_url, settings.agent_token_file)
    prefetcher = Prefetcher(images)
    announcer = this_node.NodeAnnouncer(
        registry.put_node, describe, prefetcher.set_wanted, checks.note_token_fault
    )
    start_thread("announce", announcer.run)
    start_thread("prefetch", prefetcher.run, announcer.wake)
    try:
        yield
    finally:
        announcer.stop()
        prefetcher.stop()


class _RenewingNodeRegistry:
    """Announces the node to the API and stores the token when the API renews it."""

    def __init__(self, url: str, token_file: Path) -> None:
        self._client = NodeClient(url, partial(read_token, token_file))
        self._token = NodeToken(token_file)

    def put_node(self, node: Node) -> NodeWishes:
        """Register or update the node; return the service's requests to it."""
        wishes = self._client.put_node(node, renew=self._token.is_due())
        if wishes.token:
            self._token.replace(wishes.token)
        return wishes


def _watch_hypervisors(
    images: ImageSource, hypervisors: HypervisorRegistry, stop: threading.Event
) -> None:
    """Probe failed hypervisors again.

    Probes run when images arrive (kvm and qemu boot a kernel from an image), at every check while no
    hypervisor works, and every ``PROBE_AGAIN_SECONDS`` for those that worked before or were slow.
    """
    known = _cached_digests(images)
    due = time.monotonic() + PROBE_AGAIN_SECONDS
    while not stop.wait(this_node.ANNOUNCE_SECONDS):
        present = _cached_digests(images)
        if present != known or not _has_working_hypervisor(hypervisors):
            known = present
            hypervisors.reprobe_failing()
        elif time.monotonic() >= due:
            due = time.monotonic() + PROBE_AGAIN_SECONDS
            hypervisors.reprobe_failing(only_likely=True)


def _cached_digests(images: ImageSource) -> list[str]:
    """Return the digests of cached images; none if the cache cannot be read."""
    try:
        return images.cached()
    except OSError as error:
        log.error("cannot read the image cache: %s", error)
        return []


def _image_directory(settings: Config) -> Path:
    local = settings.agent_token_file is None
    return settings.images if local else settings.state_dir / "images"


def _image_source(settings: Config) -> ImageSource:
    if settings.agent_token_file is None:
        return ImageStore(settings.images)
    token = partial(read_token, settings.agent_token_file)
    fetcher = ImageClient(settings.api_url, token, retries=RETRIES)
    if settings.lazy_start and (why := nbd_server.unavailable_reason()):
        raise ConfigError(f"lazy_start: {why}", hint="install nbdkit and nbdkit-plugin-python")
    return ImageCache(
        _image_directory(settings),
        fetcher,
        limit=settings.image_cache_size * MIB,
        keep_free=settings.image_cache_free * MIB,
        trust=_signature_check(settings.image_trust_dir),
        lazy_start=settings.lazy_start,
    )


def _signature_check(folder: Path | None) -> SignatureCheck | None:
    """Return a check that refuses images not signed by a key then in ``folder``."""
    if folder is None:
        return None
    from images.signature import load_trusted_keys, require_signed  # noqa: PLC0415

    load_trusted_keys(folder)  # reports a wrong setting at once
    return lambda digest, signature: require_signed(digest, signature, load_trusted_keys(folder))


def _require_hypervisor(hypervisors: HypervisorRegistry, *, has_cluster_vms: bool) -> None:
    """Probe the hypervisors, and fail if none works and no cluster VMs run.

    Cluster VMs can make the node too busy for a probe; an agent that exits then leaves them unmanaged.
    """
    found = hypervisors.probe()
    if _has_working_hypervisor(hypervisors):
        return
    listing = "; ".join(f"{result.kind}: {result.detail}" for result in found)
    message = f"no hypervisor works on this node: {listing}"
    if not has_cluster_vms:
        raise NoHypervisor(message, hint="run vmjobs doctor")
    log.error("%s; the agent still manages its cluster VMs, and probes again", message)


def _has_working_hypervisor(hypervisors: HypervisorRegistry) -> bool:
    return any(result.works for result in hypervisors.results)
