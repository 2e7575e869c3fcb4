"""``vmjobs agent``: the one process on an execute node that holds rights over its VMs."""

from __future__ import annotations

import fcntl
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
from typing import TYPE_CHECKING

import click

from vmjobs.agent import condor_job
from vmjobs.agent import node as this_node
from vmjobs.agent.background import begin
from vmjobs.agent.checks import NodeChecks
from vmjobs.agent.fleet import Fleet
from vmjobs.agent.image_names import ImageNames
from vmjobs.agent.journal import sweep, sweep_probes
from vmjobs.agent.members.keeper import keeping
from vmjobs.agent.metrics import AgentMetrics
from vmjobs.agent.metrics import serving as serving_metrics
from vmjobs.agent.own_token import OwnToken
from vmjobs.agent.prefetch import Prefetcher
from vmjobs.agent.server import Agent, CondorJobServices, listening
from vmjobs.agent.starter import starter_of
from vmjobs.cli.checkpoint_stores import RETRIES, ServiceCheckpointStores
from vmjobs.cli.logs import configure_logging
from vmjobs.cli.node_parts import fleet, member_journal, member_parts, parts
from vmjobs.cli.support import config, node_name, read_token
from vmjobs.client import ImageClient, Images, JobAgentClient, NodeClient, ShareClient
from vmjobs.config import Config
from vmjobs.errors import ConfigError, NoHypervisor, NotFound
from vmjobs.hypervisor import blockserver
from vmjobs.model import MIB, Node
from vmjobs.ports import ContentCarrier, ImageSource, JobSource
from vmjobs.wire import NodeWishes, Visibility

if TYPE_CHECKING:
    from images.cache import Trust
    from images.lazy.cache import LiveCache

log = logging.getLogger(__name__)

#: How long a stopping agent waits for its machines to be gone, in seconds.
STOP_SECONDS = 20.0
#: Until a hypervisor that worked before is probed again, though another one works.
PROBE_AGAIN_SECONDS = 300.0


@click.command()
def agent() -> None:
    """Run jobs for HTCondor on this node, until a signal ends it.

    Jobs come from `vmjobs exec` over a Unix socket. What an earlier agent left behind is removed
    before the socket opens.

    Machines of virtual clusters do not end with the agent: the next one takes them over. To be rid of
    them, drain or delete their clusters, or start the agent with VMJOBS_CLUSTER_MEMORY=0.
    """
    settings = config("agent_token_file")
    configure_logging(settings.log_level, settings.log_format)
    with _alone(settings.state_dir):
        _serve(settings)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One agent at a time has what lies there: what another one finds it takes for that of a dead one.

    Raises:
        ConfigError: there is one already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "agent.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"state_dir: another agent runs, and has {directory}") from None
        yield


def _serve(settings: Config) -> None:
    images = _images(settings)
    hypervisors = fleet(settings, images)
    live = _live(settings, images)
    metrics = _metrics(images, hypervisors)
    made = parts(settings, images, hypervisors, settings.state_dir / "runs", live)
    made = replace(made, timed=metrics.job_step, carrier=_carrier())
    leftovers = made.journal.recover(hypervisors.drivers)
    swept = sweep(made.journal, hypervisors.drivers) + sweep_probes(hypervisors.drivers)
    log.info("removed %d left-over runs and %d unknown machines", len(leftovers), len(swept))
    _require_one(hypervisors, machines_run=member_journal(settings).has_members())

    names = ImageNames(partial(_resolve, settings, images))

    def describe(running: tuple[str, ...]) -> Node:
        name, cached = node_name(settings), _cached(images)
        found = hypervisors.results
        return this_node.describe(name, settings, found, cached, running, names.of(cached))

    def open_job(job_id: str, token: str) -> JobSource:
        return JobAgentClient(settings.api_url, token, job_id, retries=RETRIES)

    condor_jobs = _condor_jobs(settings, names.resolve)
    condor_job.clear(condor_jobs.spool)
    checks = NodeChecks(settings.state_dir, _image_directory(settings), settings.job_users)
    service = Agent(made, open_job, describe, condor_jobs, checks=checks.faults)
    service.remember(leftovers)
    hypervisors.on_loss = service.health.on_rest = checks.on_change = service.announce
    metrics.jobs, metrics.faults = service.states, service.faults
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # condor_master passes on a reconfiguration as SIGHUP; there is nothing to read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with (
        serving_metrics(metrics, settings.metrics_listen),
        _members(settings, images, hypervisors, metrics),
        listening(settings.socket, service.serve),
    ):
        log.info("ready at %s", settings.socket)
        begin("hypervisors", _watch_hypervisors, images, hypervisors, stop)
        with _announced(settings, images, service.node, checks):
            stop.wait()
        service.stop(STOP_SECONDS)
    if live is not None:
        live.close()


def _resolve(settings: Config, images: ImageSource, ref: str) -> str:
    """The digest of an image that everybody may use, from its name."""
    from images.store import ImageStore  # noqa: PLC0415

    if isinstance(images, ImageStore):
        return images.resolve(ref)
    token = read_token(settings.agent_token_file) if settings.agent_token_file else ""
    with Images(settings.api_url, token, retries=RETRIES) as client:
        found = client.detail(ref)
    if found.visibility is not Visibility.PUBLIC:
        raise NotFound(f"image: there is no {ref} that everybody may use")
    return found.digest


def _condor_jobs(settings: Config, resolve: Callable[[str], str]) -> CondorJobServices:
    """What transparent jobs need. resolve: see ``CondorJobServices``."""
    trusted = {0, os.getuid()}
    with suppress(KeyError):
        trusted.add(pwd.getpwnam(settings.condor_user).pw_uid)
    memory = settings.node_memory or this_node.memory_mib()
    slot_of = partial(starter_of, trusted=trusted)
    stores = None if settings.agent_token_file is None else ServiceCheckpointStores(settings)
    return CondorJobServices(settings.state_dir / "handed", memory, resolve, slot_of, stores)


def _metrics(images: ImageSource, hypervisors: Fleet) -> AgentMetrics:
    from images.cache import ImageCache  # noqa: PLC0415

    metrics = AgentMetrics()
    metrics.probes = lambda: hypervisors.results
    metrics.cache = images if isinstance(images, ImageCache) else None
    return metrics


@contextmanager
def _members(
    settings: Config, images: ImageSource, hypervisors: Fleet, metrics: AgentMetrics
) -> Iterator[None]:
    """Keep this node's share of virtual clusters; where it is to have none, remove what it had."""
    if settings.agent_token_file is None or settings.cluster_memory == 0:
        journal = member_journal(settings)
        if count := journal.clear(hypervisors.drivers):
            log.warning("removed %d machines of clusters: this node has no memory for them", count)
        yield
        return
    token = partial(read_token, settings.agent_token_file)
    source = ShareClient(settings.api_url, token, node_name(settings))
    made = member_parts(settings, source, images, hypervisors)
    made.reporter.heard, metrics.members = metrics.member, made.reporter.known
    with keeping(made):
        yield
    source.close()


@contextmanager
def _announced(
    settings: Config, images: ImageSource, describe: Callable[[], Node], checks: NodeChecks
) -> Iterator[None]:
    """Tell the API about this node, and do what it asks in return."""
    if settings.agent_token_file is None:
        yield
        return
    registry = _Registry(settings.api_url, settings.agent_token_file)
    prefetcher = Prefetcher(images)
    announcer = this_node.Announcer(registry, describe, prefetcher.wish, checks.note_refusal)
    begin("announce", announcer.run)
    begin("prefetch", prefetcher.run, announcer.soon)
    try:
        yield
    finally:
        announcer.stop()
        prefetcher.stop()


class _Registry:
    """The API, where the node is announced and gets a new token in time."""

    def __init__(self, url: str, token_file: Path) -> None:
        self._client = NodeClient(url, partial(read_token, token_file))
        self._token = OwnToken(token_file)

    def put_node(self, node: Node) -> NodeWishes:
        """See :class:`vmjobs.agent.node.NodeRegistry`."""
        wishes = self._client.put_node(node, renew=self._token.is_due())
        if wishes.token:
            self._token.replace(wishes.token)
        return wishes


def _watch_hypervisors(images: ImageSource, hypervisors: Fleet, stop: threading.Event) -> None:
    """Probe again what did not work: when images have come, as kvm and qemu boot a kernel that an image
    brings; time and again while nothing works; and seldom what worked, as it may have been mended.
    """
    known = _cached(images)
    due = time.monotonic() + PROBE_AGAIN_SECONDS
    while not stop.wait(this_node.ANNOUNCE_SECONDS):
        present = _cached(images)
        if present != known or not _works(hypervisors):
            known = present
            hypervisors.probe_the_rest()
        elif time.monotonic() >= due:
            due = time.monotonic() + PROBE_AGAIN_SECONDS
            hypervisors.probe_the_rest(lost=True)


def _cached(images: ImageSource) -> list[str]:
    """Digests of the images that are here; none where the cache cannot be read."""
    try:
        return images.cached()
    except OSError as error:
        log.error("the image cache cannot be read: %s", error)
        return []


def _image_directory(settings: Config) -> Path:
    local = settings.agent_token_file is None
    return settings.images if local else settings.state_dir / "images"


def _carrier() -> ContentCarrier:
    from images.carrier import Carrier  # noqa: PLC0415 - a command that is not used need not load it

    return Carrier()


def _images(settings: Config) -> ImageSource:
    from images.cache import ImageCache  # noqa: PLC0415
    from images.lazy.cache import LiveCache  # noqa: PLC0415
    from images.store import ImageStore  # noqa: PLC0415

    if settings.agent_token_file is None:
        return ImageStore(settings.images)
    token = partial(read_token, settings.agent_token_file)
    fetcher = ImageClient(settings.api_url, token, retries=RETRIES)
    cache = LiveCache if settings.lazy_start else ImageCache
    return cache(
        _image_directory(settings),
        fetcher,
        limit=settings.image_cache_size * MIB,
        keep_free=settings.image_cache_free * MIB,
        trust=_trust(settings.image_trust_dir),
    )


def _live(settings: Config, images: ImageSource) -> LiveCache | None:
    """What gives images out before they are complete, where that is wanted."""
    from images.lazy.cache import LiveCache  # noqa: PLC0415

    if not settings.lazy_start or not isinstance(images, LiveCache):
        return None
    if why := blockserver.missing():
        raise ConfigError(f"lazy_start: {why}", hint="install nbdkit and nbdkit-plugin-python")
    return images


def _trust(folder: Path | None) -> Trust | None:
    """What refuses images that nobody signed whose key is in ``folder``, as it is at that moment."""
    if folder is None:
        return None
    from images.signature import require_signed, trusted_keys  # noqa: PLC0415

    trusted_keys(folder)  # a setting that cannot work is told at once
    return lambda digest, signature: require_signed(digest, signature, trusted_keys(folder))


def _require_one(hypervisors: Fleet, *, machines_run: bool) -> None:
    """Probe. Where machines of clusters run, nothing that works may be due to a busy node: whoever gave
    up then would leave them to nobody, again and again.
    """
    found = hypervisors.probe()
    if _works(hypervisors):
        return
    listing = "; ".join(f"{result.kind}: {result.detail}" for result in found)
    message = f"no hypervisor works on this node: {listing}"
    if not machines_run:
        raise NoHypervisor(message, hint="run vmjobs doctor")
    log.error("%s; its machines are looked after, and it is probed again", message)


def _works(hypervisors: Fleet) -> bool:
    return any(result.works for result in hypervisors.results)
