"""Gateways: their declarations, what their VMs are told, and messages to their supervisor."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from tests.kit.gateway_specs import gateway_spec
from vmjobs.cluster.vm_state import Goal, Phase
from vmjobs.cluster.wire import ClusterVmReport, ClusterVmReports, PoolToken
from vmjobs.errors import Conflict, Forbidden, InvalidSpec, NotFound, Unavailable
from vmjobs.gateway.assignments import GatewayAssignments, GatewayVmState, ScriptStatus, vm_state
from vmjobs.gateway.control import Message, SupervisorClient, serve_commands
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway, network_files, vm_id
from vmjobs.gateway.spec import GatewayRole, parse_gateway
from vmjobs.model import Digest, HypervisorKind

DIGEST = Digest("sha256:" + "1" * 64)
CE = gateway_spec()["machines"]["ce"]


def machine(**changes: Any) -> dict[str, Any]:
    found = gateway_spec()
    found["machines"]["ce"].update(changes)
    return found


def faults(data: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as refused:
        parse_gateway(data)
    return {fault.field: fault.message for fault in refused.value.faults}


def test_a_declaration_becomes_a_gateway() -> None:
    gateway = parse_gateway(gateway_spec())
    assert (gateway.name, gateway.domain) == ("tier3", "tier3.example")
    assert str(gateway.network) == "10.77.0.0/24"
    ce, wn = gateway.machines
    assert (ce.name, ce.role) == ("ce", GatewayRole.COMPUTING_ELEMENT)
    assert ce.address == IPv4Address("10.77.0.10")
    assert (wn.cpus, wn.memory, wn.disk, wn.hypervisor) == (1, 512, 2048, None)
    assert gateway.fqdn(ce) == "ce.tier3.example"
    assert gateway.of_role(GatewayRole.WORKER) == (wn,)
    assert gateway.vm("wn") is wn
    assert gateway.vm("se") is None


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        (gateway_spec(gateway="Tier3"), "gateway", "has an invalid format"),
        (gateway_spec(name="x"), "name", "is an unknown field"),
        (gateway_spec(domain="tier3"), "domain", "has an invalid format"),
        (gateway_spec(domain=f"{'a' * 64}.org"), "domain", "has an invalid format"),
        (gateway_spec(network="10.77.0.1/24"), "network", "network"),
        (gateway_spec(network="172.16.0.0/12"), "network", "between 16 and 29 bits"),
        (gateway_spec(network="10.0.2.0/24"), "network", "must not overlap 10.0.2.0/24"),
        (gateway_spec(network="8.8.8.0/24"), "network", "private"),
        (gateway_spec(network="fd00::/64"), "network", "network"),
        (gateway_spec(machines={}), "machines", "at least 1"),
        (gateway_spec(machines=["ce"]), "machines.0", "dictionary"),
        (gateway_spec(machines={"ce": 1}), "machines.ce", "dictionary"),
        (gateway_spec(machines={"Ce": CE}), "machines.Ce", "has an invalid format"),
        (machine(role="proxy"), "machines.ce.role", "'computing-element'"),
        (machine(image=""), "machines.ce.image", "has an invalid format"),
        (
            gateway_spec(machines={"a": {"role": "worker", "address": "10.77.0.9"}}),
            "machines.a.image",
            "is missing",
        ),
        (machine(recipe="x.toml"), "machines.ce.recipe", "not both"),
        (machine(address="10.77.1.10"), "machines.ce.address", "is not in the network 10.77.0.0/24"),
        (machine(address="10.77.0.0"), "machines.ce.address", "is reserved"),
        (machine(address="10.77.0.255"), "machines.ce.address", "is reserved"),
        (machine(address="10.77.0.x"), "machines.ce.address", "IPv4"),
        (machine(address=12), "machines.ce.address", "must be an address"),
        (machine(memory=63), "machines.ce.memory", "64"),
        (machine(cpus=True), "machines.ce.cpus", "integer"),
        (machine(cpus=4), "machines.ce.cpus", "a uml VM has at most 1 processor, but 4 are requested"),
        (machine(disk=0), "machines.ce.disk", "64"),
        (machine(hypervisor="vmware"), "machines.ce.hypervisor", "uml"),
        (machine(name="ce"), "machines.ce.name", "is an unknown field"),
        (machine(publish=[1094, "22:"]), "machines.ce.publish.1", "must be like 1094, 2222:22"),
        (machine(run="httpd -f"), "machines.ce.run", "is for VMs with the role service"),
        (machine(role="service"), "machines.ce.run", "is missing: the command of the service"),
        (gateway_spec(people={"Ada": {}}), "people.Ada", "invalid format"),
        (gateway_spec(people={"ada": {"keys": ["rm -rf /"]}}), "people.ada.keys.0", "invalid format"),
        (machine(limits={"cpu_percent": 0}), "machines.ce.limits.cpu_percent", "1"),
        (machine(publish=["65536:22"]), "machines.ce.publish.0.port", "65535"),
        (
            machine(publish=[1094, "192.0.2.1:1094:94"]),
            "machines.ce.publish.1",
            "the port 192.0.2.1:1094 is also published for ce",
        ),
    ],
)
def test_a_fault_is_told_at_its_field(data: Any, field: str, words: str) -> None:
    found = faults(data)
    assert list(found) == [field]
    assert words in found[field]


def test_all_faults_are_told_at_once() -> None:
    data = machine(memory=1, role="x")
    data["domain"] = "-"
    data["machines"]["wn"]["address"] = "10.77.0.10"
    found = faults(data)
    assert set(found) == {"domain", "machines.ce.memory", "machines.ce.role", "machines.wn.address"}
    assert found["machines.wn.address"] == "is also the address of ce"


@pytest.mark.parametrize("value", [None, [], 5, {"machines": None}, {"machines": {"a": None}}, {1: 2}])
def test_nonsense_is_refused_and_never_crashes(value: Any) -> None:
    assert faults(value)


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
def assignments(place: GatewayDirectory) -> GatewayAssignments:
    return GatewayAssignments(place, place.installed())


def report(assignments: GatewayAssignments, name: str, phase: Phase, incarnation: int = 1) -> None:
    told = ClusterVmReport(
        id=vm_id(name), incarnation=incarnation, phase=phase, since=datetime.now(UTC)
    )
    assignments.report(ClusterVmReports(reports=(told,)))


def goals(assignments: GatewayAssignments) -> dict[str, Goal]:
    return {order.name: order.goal for order in assignments.assignment(-1, 0).members}


def shown(assignments: GatewayAssignments, name: str) -> Any:
    machines: Any = assignments.show(-1, 0)["machines"]
    return machines[name]


def test_what_is_wanted_is_ordered_and_outlives_the_supervisor(
    place: GatewayDirectory, assignments: GatewayAssignments
) -> None:
    assert goals(assignments) == {"ce": Goal.DRAIN, "wn": Goal.DRAIN}
    limits = [order.limits.cpu_percent for order in assignments.assignment(-1, 0).members]
    assert limits == [None, 50]
    assignments.set_wanted({"ce", "wn"}, set())
    assignments.set_wanted(set(), {"wn"})
    assert goals(assignments) == {"ce": Goal.RUN, "wn": Goal.DRAIN}
    assert goals(GatewayAssignments(place, place.installed())) == goals(assignments)


def test_a_stopped_vm_that_is_wanted_is_begun_again(assignments: GatewayAssignments) -> None:
    begun: list[tuple[str, int]] = []
    assignments.on_restart = lambda vm, incarnation: begun.append((vm, incarnation))
    report(assignments, "ce", Phase.GONE, 3)
    assert not begun
    assignments.set_wanted({"ce"}, set())
    assert begun == [(vm_id("ce"), 3)]


def test_a_service_is_up_once_its_script_says_so(assignments: GatewayAssignments) -> None:
    assignments.set_wanted({"ce"}, set())
    report(assignments, "ce", Phase.RUNNING)
    assert shown(assignments, "ce")["state"] == GatewayVmState.STARTING
    assignments.words(vm_id("ce"), 1, b"hello\nvmjobs-gate")
    assignments.words(vm_id("ce"), 1, b"way: up\n")
    assert shown(assignments, "ce")["state"] == GatewayVmState.UP
    assert {o.name: o.admitted for o in assignments.assignment(-1, 0).members} == {"ce": 1, "wn": 0}
    assignments.words(vm_id("ce"), 1, b"vmjobs-gateway: down no schedd\r\n")
    assert shown(assignments, "ce")["state"] == GatewayVmState.DOWN
    assert shown(assignments, "ce")["message"] == "no schedd"
    report(assignments, "ce", Phase.RUNNING, 2)
    assert shown(assignments, "ce")["state"] == GatewayVmState.STARTING, (
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


def test_a_full_disk_is_told(assignments: GatewayAssignments) -> None:
    report(assignments, "ce", Phase.RUNNING)
    assignments.words(vm_id("ce"), 1, b"vmjobs-gateway: full 85\nvmjobs-gateway: up\n")
    assert (shown(assignments, "ce")["full"], shown(assignments, "ce")["message"]) == (85, "")
    assignments.words(vm_id("ce"), 1, b"vmjobs-gateway: full 95\nvmjobs-gateway: full of ideas\n")
    assert "its data disk is 95 % full" in shown(assignments, "ce")["message"]


def test_who_asks_for_frozen_data_waits_for_the_answer(assignments: GatewayAssignments) -> None:
    vm = vm_id("ce")
    assignments.words(vm, 1, b"vmjobs-gateway: up\nvmjobs-gateway: frozen\n")
    assert assignments.is_frozen(vm, 0)
    assignments.clear_frozen(vm)
    assert not assignments.is_frozen(vm, 0.05), "that was the last time"
    assert not assignments.is_frozen(vm_id("wn"), 0.05)


def test_a_vm_gets_a_token_by_its_name(assignments: GatewayAssignments) -> None:
    with pytest.raises(Forbidden):
        assignments.token(vm_id("ce"), 1)
    assignments.mint = lambda name: PoolToken(token="t", identity=name, expires=datetime.now(UTC))
    assert assignments.token(vm_id("ce"), 1).identity == "ce"
    with pytest.raises(Forbidden):
        assignments.token(vm_id("none"), 1)


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


def test_a_restart_shuts_down_and_boots_what_is_installed_now(
    place: GatewayDirectory, assignments: GatewayAssignments
) -> None:
    began: list[str] = []
    assignments.on_restart = lambda vm, _incarnation: began.append(vm)
    assignments.set_wanted({"ce", "wn"}, set())
    report(assignments, "ce", Phase.RUNNING)
    images = {**place.installed().images, "ce": Digest("sha256:" + "2" * 64)}
    place.save(place.installed().model_copy(update={"images": images}))
    assignments.restart({"ce", "wn"})
    assert goals(assignments) == {"ce": Goal.DRAIN, "wn": Goal.RUN}, "wn does not run yet"
    assert shown(assignments, "ce")["state"] == GatewayVmState.STOPPING
    assert shown(assignments, "ce")["wanted"]
    assert place.wanted() == {"ce", "wn"}, "whatever dies now, they run again"
    report(assignments, "ce", Phase.GONE)
    assert began[-1] == vm_id("ce")
    [order] = [o for o in assignments.assignment(0, 0).members if o.name == "ce"]
    assert (order.goal, order.image) == (Goal.RUN, images["ce"])


def test_disks_are_in_a_place_of_their_own(tmp_path: Path, place: GatewayDirectory) -> None:
    big = tmp_path / "big"
    big.mkdir()
    ce = place.installed().gateway.machines[0].model_copy(update={"name": "big", "place": str(big)})
    gateway = place.installed().gateway.model_copy(update={"machines": (ce,)})
    installed = place.installed().model_copy(update={"gateway": gateway, "images": {"big": DIGEST}})
    place.disks("big").parent.mkdir(parents=True)
    place.disks("big").symlink_to(big / "of a killed install")
    place.prepare(installed, ce)
    assert [path.name for path in big.iterdir()] == ["of a killed install"]
    big.rename(tmp_path / "elsewhere")
    with pytest.raises(Conflict, match="the disks of big are missing"):
        place.remove("big")
    (tmp_path / "elsewhere").rename(big)
    place.remove("big")
    assert not list(big.iterdir())


def test_one_supervisor_at_a_time_where_something_is_installed(place: GatewayDirectory) -> None:
    with (
        place.lock_supervisor(),
        pytest.raises(Conflict, match="already"),
        GatewayDirectory(place.directory).lock_supervisor(),
    ):
        pass
    with pytest.raises(NotFound, match="no gateway is installed"):
        GatewayDirectory(place.directory / "x").installed()


def test_vms_know_one_another(place: GatewayDirectory) -> None:
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


def test_who_logs_in_gets_the_connection(tmp_path: Path) -> None:
    mine, guests = socket.socketpair()

    def handle(asked: Message) -> Message:
        assert asked == {"do": "log in", "machine": "ce", "key": "mine"}
        return {"host_key": "its", "connection": guests}

    with (
        serve_commands(tmp_path / "s", handle, lambda: None),
        SupervisorClient(tmp_path / "s") as control,
    ):
        host_key, connection = control.log_in("ce", "mine")
        with mine, connection:
            assert host_key == "its"
            mine.sendall(b"hello")
            assert connection.recv(5) == b"hello"


@pytest.mark.parametrize(
    ("answer", "why"),
    [({"error": "ce does not run"}, "ce does not run"), ({"host_key": "its"}, "closed the connection")],
)
def test_without_a_connection_nobody_is_logged_in(tmp_path: Path, answer: Message, why: str) -> None:
    with (
        serve_commands(tmp_path / "s", lambda _: dict(answer), lambda: None),
        SupervisorClient(tmp_path / "s") as control,
        pytest.raises(Unavailable, match=why),
    ):
        control.log_in("ce", "mine")
