"""Metrics of the service."""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pytest import approx

from api.app import create_app
from api.tokens import USER_SCOPES, ApiTokenIssuer, Scope
from repository.clusters.history import CLUSTER_EVENTS
from repository.clusters.tables import AssignmentRow
from repository.db.models import NodeRow
from repository.service import Repository
from tests.kit.api_site import Caller, Queue, Site
from tests.kit.builds import create
from tests.kit.cluster_nodes import POOLS, Mint, World, node_of
from tests.kit.repository_jobs import ADMIN, claim, one, push, push_library, statements, told
from vmjobs import __version__
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Phase
from vmjobs.model import JobState, now

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=300),
]

Samples = dict[tuple[str, ...], float]


def parsed(text: str) -> Samples:
    """Every sample, by its name and its label values in the order of the label names."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
            key = (sample.name, *(sample.labels[name] for name in sorted(sample.labels)))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def scraper(repository: Repository) -> Caller:
    """Prometheus, with a read-only token."""
    return scraper_of(repository)


def scraper_of(repository: Repository) -> Caller:
    config = repository.config
    issuer = ApiTokenIssuer(config.data_dir / "keys" / "issuer.pem", config.issuer)
    app = create_app(config, repository, dispatcher=Queue(), issuer=issuer)
    return Caller(app.test_client(), issuer.user_token("prometheus", [Scope.COMPUTE_READ]))


def scrape(caller: Caller) -> Samples:
    answer = caller("GET", "/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.text)


def of(found: Samples, name: str) -> Samples:
    """The samples of one metric, by their label values alone."""
    return {key[1:]: value for key, value in found.items() if key[0] == name}


def test_an_empty_service_shows_zeros_and_not_nothing(scraper: Caller) -> None:
    found = scrape(scraper)
    assert of(found, "vmjobs_jobs") == {(state,): 0 for state in JobState}
    assert set(of(found, "vmjobs_builds").values()) == {0}
    assert found["vmjobs_info", __version__] == 1
    assert of(found, "vmjobs_cluster_members") == of(found, "vmjobs_nodes") == {}


def test_jobs_by_state(repository: Repository, scraper: Caller) -> None:
    jobs = [one(repository, owner).id for owner in ("ada", "ada", "bob")]
    attempt = claim(repository, jobs[0])
    repository.attempts.report(jobs[0], attempt, told(JobState.STAGING))
    found = of(scrape(scraper), "vmjobs_jobs")
    assert {state: count for (state,), count in found.items() if count} == {"QUEUED": 2, "STAGING": 1}


def test_what_two_images_share_is_stored_once(repository: Repository, scraper: Caller) -> None:
    kernel, disks = random.randbytes(500_000), (random.randbytes(300_000), random.randbytes(300_000))
    seen = [scrape(scraper)]
    for number, disk in enumerate(disks):
        push(repository, ADMIN, disk, kernel, name=f"image-{number}")
        seen.append(scrape(scraper))

    def added(name: str) -> list[float]:
        return [after[name,] - before[name,] for before, after in pairwise(seen)]

    assert added("vmjobs_images") == [1, 1]
    assert added("vmjobs_images_bytes") == [800_000, 800_000]
    assert added("vmjobs_images_stored_bytes") == [approx(800_000, rel=0.01), approx(300_000, rel=0.01)]


def test_builds_by_state(repository: Repository, scraper: Caller) -> None:
    create(repository)
    build = create(repository)
    assert repository.builds.begin(build.id) is not None
    found = of(scrape(scraper), "vmjobs_builds")
    assert {state: count for (state,), count in found.items() if count} == {"QUEUED": 1, "BUILDING": 1}


def test_a_cluster_comes_up_and_fails(world: World, scraper: Caller) -> None:
    world.apply(size=3)
    world.step()
    found = scrape(scraper)
    assert found["vmjobs_cluster_target_members", "vc"] == 3
    assert found["vmjobs_cluster_members", "vc", "ASSIGNED"] == 3
    world.bring_up()
    found = scrape(scraper)
    vms = of(found, "vmjobs_cluster_members")
    assert set(vms) == {("vc", state) for state in ClusterVmState}
    assert vms["vc", "UP"] == 3 == sum(vms.values())
    assert found["vmjobs_pool_up", "site"] == 1
    world.pool.join("vc-1", busy=True)
    world.step(60)
    world.report(world.vms()["vc-2"], Phase.WAITING, failures=4)
    found = scrape(scraper)
    assert found["vmjobs_cluster_busy_members", "vc"] == 1
    assert found["vmjobs_cluster_member_failures", "vc"] == 4
    assert found["vmjobs_cluster_members", "vc", "BACKOFF"] == 1
    world.pool.down = True
    world.step(60)
    assert scrape(scraper)["vmjobs_pool_up", "site"] == 0
    world.repository.cluster_actions.drain("vc", "root")
    assert scrape(scraper)["vmjobs_cluster_target_members", "vc"] == 0


def test_drains_upgrades_and_rollbacks_are_counted(
    world: World, other: Repository, scraper: Caller
) -> None:
    world.apply(size=2)
    world.bring_up()
    world.step()
    found = scrape(scraper)
    changes = {(what.lower(), "vc") for what in CLUSTER_EVENTS}
    assert set(of(found, "vmjobs_cluster_changes_total")) == changes
    assert found["vmjobs_cluster_changes_total", "created", "vc"] == 1
    assert found["vmjobs_cluster_changes_total", "draining", "vc"] == 0
    assert found["vmjobs_cluster_member_changes_total", "vc", "UP"] == 2
    assert found["vmjobs_cluster_member_changes_total", "vc", "DRAINING"] == 0
    assert found["vmjobs_cluster_outdated_members", "vc"] == 0
    world.apply(size=2, memory=300)
    world.step()
    found = scrape(scraper)
    assert found["vmjobs_cluster_changes_total", "changed", "vc"] == 1
    assert found["vmjobs_cluster_outdated_members", "vc"] == 2
    assert found["vmjobs_cluster_member_changes_total", "vc", "DRAINING"] == 1  # one at a time
    for _ in range(2):
        world.repository.cluster_actions.drain("vc", "root")  # a repeated drain does not count
    world.repository.cluster_actions.resume("vc", "root")
    found = scrape(scraper)
    assert found["vmjobs_cluster_changes_total", "draining", "vc"] == 1
    assert found["vmjobs_cluster_changes_total", "resumed", "vc"] == 1
    assert scrape(scraper_of(other)) == found  # every process of a service gives the same answer


def test_guards_are_shown_while_they_are_not_open(world: World, scraper: Caller) -> None:
    world.apply(size=1)
    world.step()
    found = scrape(scraper)
    assert of(found, "vmjobs_cluster_guards") == {("closed",): 0, ("half-open",): 0}
    assert of(found, "vmjobs_cluster_guard_failures") == {}
    (vm,) = world.vms().values()
    world.report(vm, Phase.WAITING, 3, failures=3, code=ClusterVmCode.BOOT_FAILED)
    world.step()
    found = scrape(scraper)
    key = (vm.image, vm.node, "closed")
    assert of(found, "vmjobs_cluster_guard_failures") == {key: 3}
    assert found["vmjobs_cluster_guards", "closed"] == 1
    assert found["vmjobs_cluster_changes_total", "guard_closed", "vc"] == 1


@pytest.mark.settings(token_issuer=Mint())
def test_tokens_are_counted_whatever_became_of_the_request(site: Site, world: World) -> None:
    world.apply(size=1, image="tiny")
    world.step()
    (vm,) = world.vms().values()
    other = "n2" if vm.node == "n1" else "n1"
    url = f"/v1/nodes/{{}}/members/{vm.id}/token"
    asked = {"json": {"incarnation": 1}}
    assert site.node(vm.node)("POST", url.format(vm.node), **asked).status_code == 200
    for _ in range(2):  # for a VM that it does not run, and under another node's name
        site.node(other).problem(403, "POST", url.format(other), **asked)
        site.node(other).problem(403, "POST", url.format(vm.node), **asked)
    found = parsed(site.user()("GET", "/metrics").text)
    assert of(found, "vmjobs_cluster_tokens_total") == {("given", "here"): 1, ("refused", "here"): 4}


def test_nodes_and_their_room(world: World, repository: Repository, scraper: Caller) -> None:
    repository.nodes.put(node_of("n3", site="there", cluster_cpus=0, cluster_memory=0))
    world.apply(size=2)
    world.bring_up()
    found = scrape(scraper)
    alive, lost = (
        {("here", "alive"): 2, ("there", "alive"): 1},
        {("here", "lost"): 0, ("there", "lost"): 0},
    )
    assert of(found, "vmjobs_nodes") == {**alive, **lost}
    assert found["vmjobs_cluster_offered_cpus", "here"] == 8
    assert found["vmjobs_cluster_taken_cpus", "here"] == 2
    assert found["vmjobs_cluster_offered_memory_bytes", "here"] == 2 * 1024 * 1024**2
    assert found["vmjobs_cluster_taken_memory_bytes", "here"] == 2 * 256 * 1024**2
    assert found["vmjobs_cluster_offered_cpus", "there"] == 0
    silence(repository, "n1")
    found = scrape(scraper)
    assert found["vmjobs_nodes", "here", "lost"] == found["vmjobs_nodes", "here", "alive"] == 1
    assert [found["vmjobs_cluster_members", "vc", state] for state in ("LOST", "UP")] == [1, 1]
    assert found["vmjobs_cluster_offered_cpus", "here"] == 4
    assert found["vmjobs_cluster_taken_cpus", "here"] == 1


def silence(repository: Repository, node: str) -> None:
    """Set a node's last contact to longer ago than its lease."""
    with repository.database.write() as session:
        for row in (session.get(NodeRow, node), session.get(AssignmentRow, node)):
            assert row is not None
            row.heard = now() - timedelta(seconds=301)


def test_the_answer_does_not_grow_with_jobs_nor_the_number_of_questions(
    world: World, repository: Repository, scraper: Caller
) -> None:
    world.apply(size=2)
    world.bring_up()
    scrape(scraper)  # the first request records the use of its token
    sizes = []
    for _ in range(2):
        with statements(repository.database) as asked:
            lines = scraper("GET", "/metrics").text.count("\n")
        sizes.append((lines, len(asked)))
        for number in range(10):
            one(repository, f"user-{number}")
            push_library(repository, f"more-{number}", b"%d" % number)
    assert sizes[0] == sizes[1]
    assert sizes[0][1] <= 12
    assert "user-" not in scraper("GET", "/metrics").text


def test_who_may_ask(site: Site) -> None:
    assert site.user()("GET", "/metrics").status_code == 200
    operator = site.caller(site.issuer.user_token("root", [Scope.ADMIN]))
    assert operator("GET", "/metrics").status_code == 200
    submitter = site.caller(site.issuer.user_token("ada", USER_SCOPES - {Scope.COMPUTE_READ}))
    assert submitter.problem(403, "GET", "/metrics")["code"] == "FORBIDDEN"
    site.node("n1").problem(403, "GET", "/metrics")
    site.agent("0" * 32).problem(403, "GET", "/metrics")
    site.caller().problem(401, "GET", "/metrics")
