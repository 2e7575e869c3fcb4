"""``vmjobs cluster`` commands, against a fake of the service's API."""

from __future__ import annotations

import json
import os
import sys
import tty
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import click
import pytest

from tests.kit.cli import Run
from tests.kit.cluster_service import FAILED, IMAGE, NOW, Service, cluster, service, vm, vmjobs
from vmjobs.cli.cluster.common import complete_cluster, complete_vm_name
from vmjobs.cli.main import main
from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState
from vmjobs.cluster.wire import ClusterBackoff, ClusterVm
from vmjobs.model import Node

__all__ = ["service", "vmjobs"]

TRIXIE = "Debian GNU/Linux 13 (trixie)"
TAKES_JOBS = "a probe job ran in the VM; it accepts jobs"


def running(**fields: Any) -> ClusterVm:
    since = NOW - timedelta(hours=2)
    return vm(0, up_since=since, busy=True, jobs=7, hypervisor="uml", system=TRIXIE, **fields)


def test_show_has_a_line_for_each_vm(service: Service, vmjobs: Run) -> None:
    retry = datetime.now(UTC) + timedelta(seconds=99)
    failed = {"code": ClusterVmCode.KERNEL_PANIC, "message": "no root", "retry": retry}
    old = vm(1, ClusterVmState.BACKOFF, **failed)
    service.has(cluster(running(), old, generation=2))
    done = vmjobs("show", "workers", code=0)
    lines = done.lines
    assert "VMs 1 UP of 2 (size 2)" in lines
    assert {"image worker", f"sha256 {'1' * 64}"} <= set(lines)
    short = "111111111111 (generation 1)"
    assert f"workers-0 node1 UP 2 h 7, busy uml {short} {TRIXIE}" in lines
    (second,) = [line for line in lines if line.startswith("workers-1")]
    assert second.startswith(
        f"workers-1 node1 BACKOFF 5 min 0 - {short} - KERNEL_PANIC: no root (again in 9"
    )
    assert json.loads(vmjobs("show", "--json", "workers").out)["generation"] == 2


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (80, ["", f"    {TRIXIE}; {TAKES_JOBS}"]),
        (110, [f"  {TRIXIE}", f"    {TAKES_JOBS}"]),
        (160, [f"  {TRIXIE}  {TAKES_JOBS}"]),
    ],
)
def test_show_fits_a_terminal(
    service: Service, vmjobs: Run, monkeypatch: pytest.MonkeyPatch, columns: int, lines: list[str]
) -> None:
    service.has(cluster(running(message=TAKES_JOBS)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    out = click.unstyle(vmjobs("show", "workers").out).splitlines()
    assert max(map(len, out)) <= columns
    lines[0] = f"workers-0  node1  UP     2 h  7, busy  uml  111111111111{lines[0]}"
    assert [line.rstrip() for line in out][-len(lines) :] == lines


def test_show_says_what_failed_and_where_nothing_is_tried(service: Service, vmjobs: Run) -> None:
    guard = ClusterBackoff(
        image=IMAGE,
        node="node1",
        state=BackoffState.CLOSED,
        failures=3,
        code=ClusterVmCode.BOOT_TIMED_OUT,
        message="node1: 3 machines failed there; next try at 12:34:56 UTC",
    )
    failed = FAILED.model_copy(update={"since": datetime.now(UTC) - timedelta(minutes=5)})
    service.has(cluster(vm(0), failed=failed, guards=(guard,)))
    lines = vmjobs("show", "workers").lines
    assert "cluster workers (generation 4 failed)" in lines
    assert f"failed {FAILED.message}; 5 min ago, broken" in lines
    assert f"guard {guard.message}" in lines


ESCAPE = "\x1b]0;yours\x07\x9b2J\u202e[/red]"
JOB = {
    "id": "1" * 32,
    "array": "2" * 32,
    "index": 0,
    "count": 1,
    "owner": "ada",
    "spec": {"image": "own", "strategy": "image", "name": ESCAPE},
    "image_digest": IMAGE,
    "state": "FAILED",
    "reason": {"code": "SCRIPT_FAILED", "message": ESCAPE, "actor": "user"},
    "created": NOW.isoformat(),
    "updated": NOW.isoformat(),
    "node": ESCAPE,
    "outputs": [{"path": "[/red]", "size": 1, "digest": IMAGE}],
    "rejected": [{"path": ESCAPE, "why": ESCAPE}],
}


@pytest.mark.parametrize(
    ("noun", "words"),
    [
        *(("job", [verb, JOB["id"]]) for verb in ("status", "wait", "outputs", "log", "why")),
        ("job", ["list"]),
        ("node", ["list"]),
        ("image", ["builds", "--wait", "3" * 32]),
        ("cluster", ["scale", "workers", "2", "--wait", "--timeout", "0.1"]),
    ],
)
def test_what_others_say_is_shown_and_not_obeyed(
    service: Service, vmjobs: Run, noun: str, words: list[str]
) -> None:
    job, why = f"/v1/jobs/{JOB['id']}", JOB["reason"]
    event = {"seq": 1, "time": NOW.isoformat(), "state": "FAILED", "reason": why}
    build = {
        **{"id": "3" * 32, "name": ESCAPE, "step": ESCAPE, "state": "FAILED", "message": ESCAPE},
        **{"owner": "ada", "created": NOW.isoformat(), "updated": NOW.isoformat(), "code": "X"},
    }
    service.says(f"GET {job}", JOB)
    service.says(f"GET {job}/events?after=0", {"events": [event]})
    service.says("GET /v1/jobs?limit=256", {"jobs": [JOB], "next": ""})
    service.says("GET /v1/nodes", {"detail": ESCAPE, "title": "", "status": 403}, status=403)
    service.says(f"GET /v1/builds/{'3' * 32}", build)
    up = vm(0, ClusterVmState.BACKOFF, message=ESCAPE, system=ESCAPE, node=ESCAPE)
    service.has(cluster(up))
    service.says("POST /v1/clusters/workers/scale", cluster(up))
    done = vmjobs(*words, noun=noun)
    said = done.out + done.err
    assert "yours" in said, said
    assert all(char.isprintable() or char in "\n\t" for char in said)


@pytest.mark.parametrize("command", [["job", "out"], ["cluster", "console"]])
def test_a_terminal_obeys_nothing_of_what_a_guest_prints_and_a_file_has_all_of_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    noun, verb = command
    printed = f"50%\r100%\t\N{GREEK SMALL LETTER MU}\r\n{ESCAPE}\n".encode() + b"\xff\n"
    service.says(f"GET /v1/jobs/{JOB['id']}/{verb}", printed)
    service.has(cluster(vm(0)))
    service.says("GET /v1/clusters/workers/members/workers-0/console?incarnation=1", printed)
    whose = [str(JOB["id"])] if noun == "job" else ["workers", "workers-0"]
    said = {}
    for kind, (reader, writer) in {"pipe": os.pipe(), "terminal": os.openpty()}.items():
        os.set_blocking(reader, False)
        if kind == "terminal":
            tty.setraw(writer)
        with os.fdopen(writer, "w") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit):
                main([noun, verb, *whose])
            stdout.flush()
            said[kind] = os.read(reader, 4096)
        os.close(reader)
    assert said["pipe"] == printed
    shown = said["terminal"].decode()
    assert shown.startswith("50%\r100%\t\N{GREEK SMALL LETTER MU}\r\n")
    assert "yours" in shown
    assert all(char.isprintable() or char in "\n\t\r" for char in shown)


def test_list_has_a_line_for_each_cluster(service: Service, vmjobs: Run) -> None:
    other = ClusterSpec(name="other", image="hep", size=SizeRange(min=1, max=4))
    rows = [cluster(vm(0)), cluster(spec=other, draining=True)]
    service.says("GET /v1/clusters", {"clusters": rows})
    lines = vmjobs("list").lines
    assert lines[1].startswith("workers worker 2 2 1 root")
    assert lines[2].startswith("other hep 1 to 4 1 0 draining root")


def event(seq: int, text: str) -> dict[str, Any]:
    return {"member": "workers-0", "state": "UP", "code": "PROGRESS", "seq": seq, "message": text} | {
        "time": NOW.isoformat()
    }


def test_events_are_followed_until_the_cluster_has_gone(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/clusters/workers/events?after=0", {"events": [event(1, "one")]})
    assert "one" in vmjobs("events", "workers").out
    service.says(
        "GET /v1/clusters/workers/events?after=1", {"events": []}, {"events": [event(2, "two")]}
    )
    done = vmjobs("events", "-f", "--json", "workers", code=0)
    assert [json.loads(line)["message"] for line in done.out.splitlines()] == ["one", "two"]


CONSOLE = "GET /v1/clusters/workers/members/workers-0/console?incarnation="


def test_console_is_followed_over_a_restart(service: Service, vmjobs: Run) -> None:
    service.has(cluster(vm(0)))
    service.says(f"{CONSOLE}1", b"first boot\n")
    assert vmjobs("console", "workers", "0").out == "first boot\n"
    service.has(
        cluster(vm(0)),
        cluster(vm(0, ClusterVmState.BOOTING, incarnation=2)),
        cluster(),
    )
    service.says(f"{CONSOLE}1", b"first\n", b"first\npanic\n")
    service.says(f"{CONSOLE}2", b"second\n")
    done = vmjobs("console", "-f", "workers", "workers-0")
    assert (done.code, done.out) == (0, "first\npanic\nsecond\n")
    assert "was restarted" in done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("diff c.yaml", 64, "c.yaml:2:1: image: not here"),
        ("show others", 66, "not here"),
        ("console workers 7", 66, "workers has no VM workers-7"),
        ("upgrade workers image!", 64, "image"),
        ("scale workers 1001", 2, "1001"),
        ("retry workers --wait --timeout -1", 2, "-1"),
        ("validate --offline --capacity c.yaml", 2, "--offline"),
    ],
)
def test_what_cannot_be_changes_nothing(
    service: Service, vmjobs: Run, words: str, code: int, said: str
) -> None:
    service.has(cluster(vm(0)))
    done = vmjobs(*words.split())
    assert (done.code, said in done.err) == (code, True), done.err
    assert all(request.startswith("GET") for request in service.asked)


def node(name: str, **offered: int) -> Node:
    return Node(name=name, cpus=8, memory=8192, disk=1, updated=NOW, **offered)


OFFER = node("node1", cluster_cpus=4, cluster_memory=4096)


def test_nodes_show_what_they_have_for_clusters(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/nodes", {"nodes": [OFFER, node("node2")]})
    service.says("GET /v1/nodes/node1", OFFER)
    service.says("GET /v1/clusters", {"clusters": [cluster()]})
    there = [
        vm(0),
        vm(1),
        vm(2, ClusterVmState.GONE),
        vm(3, ClusterVmState.PENDING, node=""),
    ]
    service.has(cluster(*there))
    done = vmjobs("list", noun="node")
    assert "2 of 4 cpus, 2048 of 4096 MiB" in done.lines[1]
    assert done.lines[2].startswith("node2 none 8 8192 MiB 0 0 - ")
    lines = vmjobs("show", "node1", noun="node").lines
    assert {"cluster VM workers-0", "cluster VM workers-1"} <= set(lines)
    assert "cluster VM workers-2" not in lines


def test_nodes_are_shown_to_those_who_may_not_see_clusters(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/nodes", {"nodes": [OFFER]})
    service.refuses("GET /v1/clusters", 403, "FORBIDDEN", "not for you")
    done = vmjobs("list", noun="node", code=0)
    assert "0       4 cpus, 4096 MiB  " in done.out


def test_names_are_completed(service: Service) -> None:
    context = click.Context(click.Command("show"))
    parameter = click.Argument(["name"])
    rows = [cluster(), cluster(spec=ClusterSpec(name="other", image="hep", size=1))]
    service.says("GET /v1/clusters", {"clusters": rows})
    assert complete_cluster(context, parameter, "w") == ["workers"]
    service.has(cluster(vm(0), vm(1)))
    context.params["name"] = "workers"
    assert complete_vm_name(context, parameter, "") == ["workers-0", "workers-1"]
    service.answers.clear()
    assert complete_cluster(context, parameter, "w") == []
    assert complete_vm_name(context, parameter, "") == []


def test_the_service_is_asked_where_it_is(service: Service, vmjobs: Run) -> None:
    vmjobs("show", "a/../b")
    assert [urlsplit(line.split()[1]).path for line in service.asked] == ["/v1/clusters/a%2F..%2Fb"]


AD = """MyType = "Machine"
Name = "slot1@workers.offline.vc"
vmjobscluster = "workers"
Start = (TARGET.VMJobsCluster = "others")
Said = "VMJobsCluster = \\"others\\""
Offline = true
"""


def test_wake_takes_the_clusters_name_from_a_machines_ad(service: Service, vmjobs: Run) -> None:
    service.says("POST /v1/clusters/workers/wake", b"", status=204)
    done = vmjobs("wake", stdin=AD)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert service.asked == ["POST /v1/clusters/workers/wake"]
    service.refuses("POST /v1/clusters/workers/wake", 403, "FORBIDDEN", "the token is too narrow")
    done = vmjobs("wake", stdin=AD)
    assert (done.code, "the token is too narrow" in done.err) == (77, True)


@pytest.mark.parametrize(
    ("ad", "said"),
    [
        ("", "has VMJobsCluster 0 times, not once"),
        ("\0\xff" * 1000, "has VMJobsCluster 0 times, not once"),
        ("VMJobsCluster = workers\n", "has VMJobsCluster 0 times, not once"),
        ('XVMJobsCluster = "workers"\n', "has VMJobsCluster 0 times, not once"),
        (AD + 'VMJobsCluster = "others"\n', "has VMJobsCluster 2 times, not once"),
        ('VMJobsCluster = "../jobs"\n', "has a VMJobsCluster that is not a cluster's name"),
        (f'VMJobsCluster = "{"a" * 33}"\n', "has a VMJobsCluster that is not a cluster's name"),
        (AD + "x" * (1 << 20), "has more than 1048576 bytes"),
    ],
)
def test_wake_takes_nothing_else_from_it(service: Service, vmjobs: Run, ad: str, said: str) -> None:
    done = vmjobs("wake", stdin=ad, code=64)
    assert f"the machine's ad on standard input {said}" in " ".join(done.err.split())
    assert service.asked == []
