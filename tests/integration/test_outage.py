"""Outages of single services: users see what is down, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import requests

from tests.kit.grid import Grid, healthy, run, wait_for
from vmjobs.client import Client, Retries
from vmjobs.errors import Unavailable
from vmjobs.model import JobSpec, JobState

pytestmark = pytest.mark.disruptive

TRUE = "#!/bin/sh\ntrue\n"


@contextmanager
def stopped(grid: Grid, service: str) -> Iterator[None]:
    """Stop a service; start it afterwards and wait until it is healthy."""
    run("docker", "stop", "-t", "5", grid.container(service))
    try:
        yield
    finally:
        run("docker", "start", grid.container(service))
        healthy(grid.container(service))


def impatient(grid: Grid) -> Client:
    """A client that tries once, and waits for the answer."""
    from vmjobs.cli.common import config, read_token

    once = Retries(deadline=120.0, first=600.0, ceiling=600.0)
    return Client(grid.url, read_token(config().token_file), retries=once)


@pytest.mark.soak_for("rabbitmq")
@pytest.mark.parametrize(("service", "named"), [("rabbitmq", "broker"), ("postgres", "database")])
def test_submission_says_what_is_down_and_stores_nothing(grid: Grid, service: str, named: str) -> None:
    spec = JobSpec(image="generic", script=TRUE, name=f"while {named} is down")
    with stopped(grid, service):
        with pytest.raises(Unavailable) as refused:
            impatient(grid).submit(spec)
        assert refused.value.service == named
        health = requests.get(f"{grid.url}/healthz", timeout=30)
        assert health.status_code == 503
        assert health.json()["services"][named] != "ok"
    wait_for(lambda: requests.get(f"{grid.url}/healthz", timeout=30).ok, "the API to be well", 120)
    assert all(job.spec.name != spec.name for job in grid.api.jobs())
    (job,) = grid.submit(TRUE)
    assert grid.wait(job)[0].state is JobState.COMPLETED


def test_a_schedd_that_is_down_delays_and_loses_nothing(grid: Grid) -> None:
    with stopped(grid, "submit"):
        (job,) = grid.submit(TRUE)
        wait_for(
            lambda: grid.api.job(job.id).reason.code == "SCHEDULER_UNAVAILABLE",
            "the job to say what it waits for",
            90,
        )
        assert grid.api.job(job.id).state is JobState.QUEUED
    (ended,) = grid.wait(job, timeout=300)
    assert ended.state is JobState.COMPLETED
