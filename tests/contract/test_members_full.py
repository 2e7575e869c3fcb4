"""A node whose disk is full, as far as the agent's own files go: nothing can be written there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from full_kit import nothing_fits
from hypervisor_host import wait_until
from members_node import Images, Service, clear, kept, member_guest, member_parts, order, remains

from vmjobs.agent.members.keeper import TROUBLE_SECONDS, Keeper
from vmjobs.agent.members.parts import MemberParts
from vmjobs.cluster.member import MemberCode, Phase
from vmjobs.cluster.wire import MemberReport, NodeShare
from vmjobs.hypervisor.base import BootImage

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def image() -> BootImage:
    return member_guest()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    (tmp_path / "service").mkdir()
    return Service(tmp_path / "service")


@pytest.fixture
def parts(tmp_path: Path, image: BootImage, service: Service) -> Iterator[MemberParts]:
    made = member_parts(tmp_path / "members", service, Images(image))
    yield made
    clear(made.journal.prefix)


def told(parts: MemberParts) -> MemberReport:
    (report,) = parts.reporter.known()
    return report


def test_a_member_of_which_nothing_can_be_kept_says_so_and_mends(
    parts: MemberParts, service: Service
) -> None:
    keeper = Keeper(parts, lambda: NOW)
    keeper.take(NodeShare(revision=1, members=(order(),)))
    with nothing_fits():
        until = keeper.step(NOW)
    assert until == NOW + TROUBLE_SECONDS
    report = told(parts)
    assert (report.phase, report.code) == (Phase.WAITING, MemberCode.NODE_FAILED)
    assert "cannot keep its record" in report.message
    assert "too large" in report.message
    # A half record is none: whoever comes next begins anew.
    assert parts.journal.load() == []
    assert remains(parts) == []

    service.wants(1, order())
    with kept(parts):
        wait_until(lambda: service.is_running(1), 60, "it runs")


def test_what_was_told_of_a_full_disk_is_taken_back(parts: MemberParts) -> None:
    keeper = Keeper(parts, lambda: NOW)
    keeper.take(NodeShare(revision=1, members=(order(),)))
    with nothing_fits():
        keeper.step(NOW)
    # It is not wanted any more when there is room again: its record is as it was.
    keeper.take(NodeShare(revision=2, members=(order(goal="drain"),)))
    with nothing_fits():
        keeper.step(NOW + 1)
    assert told(parts).code is MemberCode.NODE_FAILED
    keeper.step(NOW + 2)
    assert (told(parts).phase, told(parts).code) == (Phase.GONE, MemberCode.DRAINED)
