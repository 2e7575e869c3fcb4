"""Assignments and states of a gateway's VMs: files and messages, without a VM."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.kit.gateway_specs import gateway_spec
from vmjobs.cluster.vm_state import Goal, Phase
from vmjobs.cluster.wire import ClusterVmReport, ClusterVmReports, PoolToken
from vmjobs.errors import Conflict, Forbidden, NotFound
from vmjobs.gateway.assignments import GatewayAssignments, GatewayVmState, ScriptStatus, vm_state
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway, network_files, vm_id
from vmjobs.gateway.spec import parse_gateway
from vmjobs.model import HypervisorKind


@pytest.fixture
def place(tmp_path: Path) -> GatewayDirectory:
    gateway = parse_gateway(gateway_spec())
    digests = {machine.name: "sha256:" + "1" * 64 for machine in gateway.machines}
    installed = InstalledGateway(schema=1, gateway=gateway, images=digests, kind=HypervisorKind.UML)
    made = GatewayDirectory(tmp_path)
    for machine in gateway.machines:
        made.prepare(installed, machine)
    made.save(installed)
    return made


@pytest.fixture
def share(place: GatewayDirectory) -> GatewayAssignments:
    return GatewayAssignments(place, place.installed())


def report(share: GatewayAssignments, name: str, phase: Phase, incarnation: int = 1) -> None:
    told = ClusterVmReport(
        id=vm_id(name), incarnation=incarnation, phase=phase, since=datetime.now(UTC)
    )
    share.report(ClusterVmReports(reports=(told,)))


def goals(share: GatewayAssignments) -> dict[str, Goal]:
    return {order.name: order.goal for order in share.share(-1, 0).members}


def shown(share: GatewayAssignments, name: str) -> Any:
    machines: Any = share.show(-1, 0)["machines"]
    return machines[name]


def test_what_is_wanted_is_ordered_and_outlives_the_supervisor(
    place: GatewayDirectory, share: GatewayAssignments
) -> None:
    assert goals(share) == {"ce": Goal.DRAIN, "wn": Goal.DRAIN}
    share.set_wanted({"ce", "wn"}, set())
    share.set_wanted(set(), {"wn"})
    assert goals(share) == {"ce": Goal.RUN, "wn": Goal.DRAIN}
    assert goals(GatewayAssignments(place, place.installed())) == goals(share)


def test_a_stopped_machine_that_is_wanted_is_begun_again(share: GatewayAssignments) -> None:
    begun: list[tuple[str, int]] = []
    share.on_restart = lambda member, incarnation: begun.append((member, incarnation))
    report(share, "ce", Phase.GONE, 3)
    assert not begun
    share.set_wanted({"ce"}, set())
    assert begun == [(vm_id("ce"), 3)]


def test_a_service_is_up_once_its_script_says_so(share: GatewayAssignments) -> None:
    share.set_wanted({"ce"}, set())
    report(share, "ce", Phase.RUNNING)
    assert shown(share, "ce")["state"] == GatewayVmState.STARTING
    share.words(vm_id("ce"), 1, b"hello\nvmjobs-gate")
    share.words(vm_id("ce"), 1, b"way: up\n")
    assert shown(share, "ce")["state"] == GatewayVmState.UP
    assert {o.name: o.admitted for o in share.share(-1, 0).members} == {"ce": 1, "wn": 0}
    share.words(vm_id("ce"), 1, b"vmjobs-gateway: down no schedd\r\n")
    assert (shown(share, "ce")["state"], shown(share, "ce")["message"]) == (
        GatewayVmState.DOWN,
        "no schedd",
    )
    report(share, "ce", Phase.RUNNING, 2)
    assert shown(share, "ce")["state"] == GatewayVmState.STARTING, (
        "another machine, of which nothing is known"
    )


def test_words_that_say_nothing_count_for_nothing() -> None:
    heard = ScriptStatus(1)
    assert not heard.take(b"vmjobs-gateway: " + b"x" * 5000 + b"\nup\nvmjobs-gateway:up\n")
    assert heard.up is None
    assert not heard.take(b"y" * 100_000)
    assert len(heard.rest) <= 1024
    assert heard.take(b"\n[ 12.3] vmjobs-gateway: frozen\n")
    assert heard.frozen is True
    assert heard.take(b"vmjobs-gateway: error: /job cannot be frozen: busy\n")
    assert heard.frozen is False


def test_who_asks_for_frozen_data_waits_for_the_answer(share: GatewayAssignments) -> None:
    member = vm_id("ce")
    share.words(member, 1, b"vmjobs-gateway: up\nvmjobs-gateway: frozen\n")
    assert share.is_frozen(member, 0)
    share.clear_frozen(member)
    assert not share.is_frozen(member, 0.05), "that was the last time"
    assert not share.is_frozen(vm_id("wn"), 0.05)


def test_a_machine_gets_a_token_by_its_name(share: GatewayAssignments) -> None:
    with pytest.raises(Forbidden):
        share.token(vm_id("ce"), 1)
    share.mint = lambda name: PoolToken(token="t", identity=name, expires=datetime.now(UTC))
    assert share.token(vm_id("ce"), 1).identity == "ce"
    with pytest.raises(Forbidden):
        share.token(vm_id("none"), 1)


@pytest.mark.parametrize(
    ("phase", "up", "condition"),
    [
        (Phase.GONE, True, GatewayVmState.STOPPED),
        (Phase.RUNNING, None, GatewayVmState.STARTING),
        (Phase.RUNNING, True, GatewayVmState.UP),
        (Phase.RUNNING, False, GatewayVmState.DOWN),
        (Phase.DRAINING, True, GatewayVmState.STOPPING),
        (Phase.STOPPING, None, GatewayVmState.STOPPING),
    ],
)
def test_conditions(phase: Phase, up: bool | None, condition: GatewayVmState) -> None:
    assert vm_state(phase, up) is condition


def test_disks_are_sparse_and_made_once(place: GatewayDirectory) -> None:
    disk = place.disks("ce") / "scratch.disk"
    assert disk.stat().st_size == 2048 * 1024 * 1024
    assert disk.stat().st_blocks * 512 < 2 * 1024 * 1024
    disk.write_bytes(b"data")
    installed = place.installed()
    place.prepare(installed, installed.gateway.machines[0])
    assert disk.read_bytes() == b"data"


def test_one_supervisor_at_a_time_where_something_is_installed(place: GatewayDirectory) -> None:
    with (
        place.lock_supervisor(),
        pytest.raises(Conflict, match="already"),
        GatewayDirectory(place.directory).lock_supervisor(),
    ):
        pass
    with pytest.raises(NotFound, match="no gateway is installed"):
        GatewayDirectory(place.directory / "x").installed()


def test_machines_know_one_another(place: GatewayDirectory) -> None:
    gateway = place.installed().gateway
    assert network_files(gateway, gateway.machines[0]) == {
        "address": b"10.77.0.10/24\n",
        "host": b"ce.tier3.example\n",
        "hosts": b"10.77.0.10 ce.tier3.example ce\n10.77.0.20 wn.tier3.example wn\n",
    }


def test_keys_are_nobody_elses(place: GatewayDirectory) -> None:
    place.save_secrets({"pool-key": b"secret"})
    assert place.secrets() == {"pool-key": b"secret"}
    assert (place.directory / "secrets").stat().st_mode & 0o077 == 0
