"""The agent's Prometheus metrics, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, cast

import pytest
import requests

from tests.kit.cluster_vm_orders import cluster_vm_order, cluster_vm_record
from tests.kit.prometheus import Samples, scrape
from tests.kit.sockets import free_port
from vmjobs import __version__
from vmjobs.agent.cluster_vms.status_reporter import StatusReporter
from vmjobs.agent.metrics import AgentMetrics, serving
from vmjobs.cluster.vm_state import ClusterVmCode, Phase
from vmjobs.errors import ConfigError
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.model import HypervisorKind, JobState


@pytest.fixture
def metrics() -> AgentMetrics:
    return AgentMetrics()


@contextmanager
def served(metrics: AgentMetrics) -> Iterator[Callable[[], Samples]]:
    listen = f"127.0.0.1:{free_port()}"
    with serving(metrics.registry, listen):
        yield partial(scrape, listen)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://{listen}/metrics", timeout=10)


def test_an_idle_agent(metrics: AgentMetrics) -> None:
    with served(metrics) as scrape:
        found = scrape()
    machines = {key[1:]: value for key, value in found.items() if key[0] == "vmjobs_agent_machines"}
    assert set(machines.values()) == {0}
    assert {("job", "running"), ("member", "running"), ("member", "waiting")} <= set(machines)
    assert found["vmjobs_agent_info", __version__] == 1
    assert found["process_resident_memory_bytes",] > 1024**2
    assert not [key for key in found if key[0].startswith("vmjobs_agent_image_cache")]


def test_jobs_by_phase(metrics: AgentMetrics) -> None:
    states = {None: 1, JobState.STAGING: 2, JobState.RUNNING: 3, JobState.COLLECTING: 1}
    metrics.jobs = lambda: Counter({**states, JobState.COMPLETED: 1})
    with served(metrics) as scrape:
        found = scrape()
    phases = {
        key[2]: value for key, value in found.items() if key[:2] == ("vmjobs_agent_machines", "job")
    }
    assert phases == {"staging": 3, "booting": 0, "running": 3, "collecting": 2}


def test_steps_of_jobs(metrics: AgentMetrics) -> None:
    with served(metrics) as scrape:
        metrics.job_step("fetch image", 0.05)
        metrics.job_step("fetch image", 45.0)
        found = scrape()
    name = "vmjobs_agent_step_seconds"
    assert found[f"{name}_count", "job", "fetch image"] == 2
    assert found[f"{name}_sum", "job", "fetch image"] == pytest.approx(45.05)
    counts = [
        found[f"{name}_bucket", "job", le, "fetch image"] for le in ("0.1", "30.0", "100.0", "+Inf")
    ]
    assert counts == [1, 1, 2, 2]


def test_vms_by_phase_what_they_took_and_failures(metrics: AgentMetrics) -> None:
    reporter = StatusReporter(cast(Any, None))  # not running
    reporter.on_change, metrics.members = metrics.member, reporter.known
    one = cluster_vm_record(incarnation=1, phase=Phase.STAGING)
    two = cluster_vm_record(
        cluster_vm_order(1), incarnation=5, phase=Phase.RUNNING, seconds={"staging": 9.0}
    )
    way = [
        one,
        two,  # a VM of an earlier agent, which counted its seconds
        one.with_changes(phase=Phase.BOOTING, seconds={"staging": 2.0}),
        one.with_changes(phase=Phase.RUNNING, seconds={"staging": 2.0, "booting": 4.0}),
        one.with_changes(
            phase=Phase.STOPPING,
            code=ClusterVmCode.GUEST_LOST,
            seconds={"staging": 2.0, "booting": 4.0},
        ),
        one.with_changes(
            phase=Phase.WAITING, code=ClusterVmCode.GUEST_LOST, failures=1, seconds={"staging": 2.0}
        ),
        one.with_changes(phase=Phase.STAGING, incarnation=2, failures=1),
        one.with_changes(phase=Phase.BOOTING, incarnation=2, failures=1, seconds={"staging": 0.5}),
    ]
    with served(metrics) as scrape:
        for record in way:
            reporter.tell(record.report())
        found = scrape()
        assert found["vmjobs_agent_machines", "member", "booting"] == 1
        assert found["vmjobs_agent_machines", "member", "running"] == 1
        assert found["vmjobs_agent_step_seconds_count", "member", "staging"] == 2
        assert found["vmjobs_agent_step_seconds_sum", "member", "staging"] == 2.5
        assert found["vmjobs_agent_step_seconds_sum", "member", "booting"] == 4.0
        assert found["vmjobs_agent_member_failures_total", "GUEST_LOST"] == 1
        reporter.forget(one.order.id)
        assert scrape()["vmjobs_agent_machines", "member", "booting"] == 0


def test_probes(metrics: AgentMetrics) -> None:
    metrics.probes = lambda: (
        ProbeResult(HypervisorKind.KVM, False, "no /dev/kvm of /home/ada", 0.1),
        ProbeResult(HypervisorKind.UML, True, "booted", 1.5),
    )
    with served(metrics) as scrape:
        found = scrape()
    assert found["vmjobs_agent_hypervisor_works", "kvm"] == 0
    assert found["vmjobs_agent_hypervisor_works", "uml"] == 1
    assert found["vmjobs_agent_hypervisor_probe_seconds", "uml"] == 1.5


def test_an_address_that_is_taken_or_nobodys_is_told_in_one_sentence(metrics: AgentMetrics) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        for listen in (f"127.0.0.1:{other.getsockname()[1]}", "192.0.2.1:9"):
            with (
                pytest.raises(ConfigError, match=f"metrics_listen.*{listen}"),
                serving(metrics.registry, listen),
            ):
                pass


def test_nothing_is_served_unless_it_is_asked_for(metrics: AgentMetrics) -> None:
    before = set(threading.enumerate())
    with serving(metrics.registry, ""):
        assert set(threading.enumerate()) == before, "something waits for connections"


def test_it_serves_at_an_address_of_version_6(metrics: AgentMetrics) -> None:
    if not socket.has_ipv6:
        pytest.fail("this host has no IPv6 at all")
    port = free_port()
    with serving(metrics.registry, f"[::1]:{port}"):
        assert requests.get(f"http://[::1]:{port}/metrics", timeout=10).status_code == 200
