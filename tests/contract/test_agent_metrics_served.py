"""What Prometheus and a log collector get from a running agent: real process, real VMs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from repository.images import LIBRARY
from tests.kit.agent_process import Node, started
from tests.kit.api_site import make_site, serving
from tests.kit.cluster_vm_node import cluster_vm_guest
from tests.kit.prometheus import scrape
from tests.kit.repository_jobs import ADMIN, push
from tests.kit.waiting import wait_until
from vmjobs.agent.run.steps import STEPS

SECONDS = 240.0


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with an agent, and a service with one image."""
    folder, image = tmp_path_factory.mktemp("metrics"), cluster_vm_guest()
    site = make_site(folder / "service")
    told = {"guest": {"contract": 1}, "cmdline": list(image.cmdline)}
    wish = {"namespace": LIBRARY, "name": "generic", "visibility": "public"}
    push(site.repository, ADMIN, image.root.read_bytes(), b"UML has its own", told, **wish)
    with serving(site.app) as url, started(site, url, folder / "node") as running:
        yield running


def test_an_agent_shows_what_it_does(node: Node) -> None:
    idle = scrape(node.listen)
    assert idle["vmjobs_agent_hypervisor_works", "uml"] == 1
    assert idle["vmjobs_agent_machines", "job", "running"] == 0
    assert idle["vmjobs_agent_image_cache_bytes",] == 0

    job, process = node.start("#!/bin/sh\nsleep 15\n")
    running = ("vmjobs_agent_machines", "job", "running")
    wait_until(lambda: scrape(node.listen)[running] == 1, SECONDS, "the job runs")
    assert process.wait(SECONDS) == 0
    wait_until(lambda: scrape(node.listen)[running] == 0, SECONDS, "the job is over")
    found = scrape(node.listen)
    assert found["vmjobs_agent_image_cache_misses_total",] == 1
    assert found["vmjobs_agent_image_cache_hits_total",] == 0
    assert found["vmjobs_agent_image_cache_bytes",] > 1024**2
    counts = {key[2]: value for key, value in found.items() if key[0].endswith("step_seconds_count")}
    assert counts == {step.title: 1 for step in STEPS} | {"deliver": 1}
    assert found["vmjobs_agent_step_seconds_sum", "job", "run script"] >= 15

    _, process = node.start("#!/bin/sh\nexit 3\n")
    assert process.wait(SECONDS) == 3
    found = scrape(node.listen)
    assert found["vmjobs_agent_image_cache_hits_total",] == 1
    assert found["vmjobs_agent_step_seconds_count", "job", "run script"] == 2

    lines = node.log()
    steps = {line["message"] for line in lines if line.get("job") == job}
    assert {f"job {job}: {step.title} took" for step in STEPS} <= {
        message.rpartition(" took")[0] + " took" for message in steps
    }
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
