"""An agent whose node can run no job: the cause it reports, and when it offers VMs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.agent_process import NODE, Node, started
from tests.kit.api_site import Site, make_site, serving
from tests.kit.cli import vmjobs
from tests.kit.prometheus import scrape
from tests.kit.waiting import wait_until

#: A corrected token takes effect within a minute on a host that is not busy.
SECONDS = 240.0
CAUSES = {"account", "disk", "image_cache", "token", "jobs"}


def ad_of(node: Node) -> dict[str, str]:
    """The machine ad's attributes, as HTCondor's startd gets them."""
    said = vmjobs("node", "ad", code=0, environ=node.environ, timeout=SECONDS)
    pairs = (line.partition(" = ") for line in said.out.splitlines())
    return {name: value for name, equals, value in pairs if equals}


def takes_no_jobs(node: Node, cause: str, why: str) -> None:
    """Wait until the node offers no VMs and reports this cause."""
    wait_until(lambda: why in ad_of(node)["VMJobsFault"], SECONDS, f"it says: {why}")
    assert ad_of(node)["HasVMJobs"] == "false"
    found = scrape(node.listen)
    assert {name for name in CAUSES if found["vmjobs_agent_fault", name]} == {cause}


def takes_jobs(node: Node) -> None:
    """Wait until the node offers VMs."""
    wait_until(lambda: ad_of(node)["HasVMJobs"] == "true", SECONDS, "jobs come again")
    assert ad_of(node)["VMJobsFault"] == '""'


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path / "service")


def test_a_node_says_what_keeps_it_from_running_jobs(site: Site, tmp_path: Path) -> None:
    with serving(site.app) as url, started(site, url, tmp_path / "node") as node:
        takes_jobs(node)
        token = node.folder / "token"
        good = token.read_text()

        token.write_text(site.issuer.node_token(NODE, lifetime=-3600.0))
        takes_no_jobs(node, "token", "the service rejects this node's token")
        token.unlink()
        takes_no_jobs(node, "token", "cannot read a token from")
        token.write_text(good)
        takes_jobs(node)

        cache = node.folder / "state" / "images" / "manifests"
        cache.touch()  # a file in place of the directory
        takes_no_jobs(node, "image_cache", f"cannot read the image cache {cache}: Not a directory")
        cache.unlink()
        takes_jobs(node)


def test_a_node_whose_token_is_half_spent_gets_a_new_one(site: Site, tmp_path: Path) -> None:
    with serving(site.app) as url, started(site, url, tmp_path / "node") as node:
        takes_jobs(node)
        token = node.folder / "token"
        old = site.node_token(NODE, age=600, lifetime=1000)
        token.write_text(old)
        wait_until(lambda: token.read_text() != old, SECONDS, "it has a new one")
        takes_jobs(node)


def test_a_node_without_the_account_of_its_jobs_offers_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMJOBS_JOB_USERS", "root, no-such-account")
    with serving(site.app) as url, started(site, url, tmp_path / "node") as node:
        takes_no_jobs(node, "account", "this node has no account no-such-account for jobs")
