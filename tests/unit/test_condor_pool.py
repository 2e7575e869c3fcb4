"""Pools of virtual clusters, as far as it needs no daemon: ads of VMs, and tokens for them."""

from __future__ import annotations

import base64
import json
import re
import stat
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import classad2
import htcondor2
import pytest

from condor import names
from condor.pool.condor_pool import (
    CondorPool,
    is_vm_ad,
    membership_expression,
    probe_jobs,
    probe_state,
    vm_from_ad,
)
from condor.pool.tokens import CondorTokenIssuer, expiry
from vmjobs.cluster.pool import PoolVm, ProbeState, WorkerVmProfile
from vmjobs.config import PoolSetting
from vmjobs.errors import Unavailable

AT = PoolSetting("site.grid", "s.grid", "grid")
AD = {names.MEMBER: "a-0", names.INCARNATION: 2, names.MACHINE: "5" * 32 + ".2"}


LIES = {
    names.MEMBER: ["a b", 3],
    names.MACHINE: ["$(HOME)", '" || true || "', 7],
    names.INCARNATION: ["x", True, 0, 3, -1, 2**62],
}


@pytest.mark.parametrize(("name", "lie"), [(name, lie) for name in LIES for lie in LIES[name]])
def test_an_ad_that_no_vm_of_ours_sends_is_none(name: str, lie: Any) -> None:
    assert is_vm_ad(AD)
    assert not is_vm_ad({**AD, name: lie})
    assert not is_vm_ad({k: v for k, v in AD.items() if k != name})


def test_what_a_vm_says_cannot_be_more_than_can_be_kept() -> None:
    lies = {names.JOB_STARTS: 2**62, names.ADMITTED: True, names.DYNAMIC_SLOTS: "x"}
    said = vm_from_ad({**AD, **lies, names.SYSTEM: "\x1b[31m" + "x" * 999})
    assert said.jobs < 2**31
    assert not said.busy
    assert said.system.isprintable()
    assert len(said.system) <= 64
    assert vm_from_ad({**AD, names.SYSTEM: 3, names.JOB_STARTS: -5, names.ADMITTED: True}).jobs == 0


def test_a_machines_ad() -> None:
    ad = {names.MEMBER: "a-0", names.INCARNATION: 2, names.SYSTEM: "Debian GNU/Linux 13"}
    assert vm_from_ad(ad) == PoolVm("a-0", 2, system="Debian GNU/Linux 13")
    assert vm_from_ad({**ad, **AD}).id == "5" * 32
    ad |= {names.DYNAMIC_SLOTS: 1, names.JOB_STARTS: 1}
    assert vm_from_ad(ad).busy
    assert vm_from_ad(ad).jobs == 0  # the only start was the probe's
    assert vm_from_ad({**ad, names.ADMITTED: True, names.JOB_STARTS: 4}).jobs == 3


@pytest.mark.parametrize(
    ("ad", "state"),
    [
        ({names.JOB_STATUS: 1}, ProbeState.WAITING),
        ({names.JOB_STATUS: 2}, ProbeState.WAITING),
        ({names.JOB_STATUS: 3}, ProbeState.FAILED),
        ({names.JOB_STATUS: 4, names.EXIT_CODE: 0}, ProbeState.RAN),
        ({names.JOB_STATUS: 4, names.EXIT_CODE: 1}, ProbeState.FAILED),
        ({names.JOB_STATUS: 4}, ProbeState.FAILED),
        ({names.JOB_STATUS: 5}, ProbeState.FAILED),
    ],
)
def test_what_a_probe_says(ad: dict[str, Any], state: ProbeState) -> None:
    assert probe_state(ad) is state


def expression(submit: Any, name: str) -> Any:
    return classad2.ExprTree(submit.expand(name))


def test_each_probe_is_for_one_vm_and_moves_no_file() -> None:
    known = [PoolVm("a-0", 1, "5" * 32), PoolVm("a-1", 1, "6" * 32)]
    made = probe_jobs(known)
    submit = htcondor2.Submit(made.description)
    for item, mine, other in zip(made.items, known, reversed(known), strict=True):
        for macro, value in item.items():
            submit[macro] = value
        job = classad2.ClassAd({"Requirements": expression(submit, "requirements")})
        job[names.PROBE] = expression(submit, f"MY.{names.PROBE}")
        for machine_ad, matches in ((mine, True), (other, False)):
            target = f"{machine_ad.id}.{machine_ad.incarnation}"
            ad = classad2.ClassAd({names.MACHINE: target, "Requirements": True})
            assert job.symmetricMatch(ad) is matches
    assert made.description["transfer_executable"] == "false"
    assert made.description["executable"] == names.PROBE_PROGRAM


class Queue:
    """Fake schedd: the calls, the jobs in the queue, and those that left it."""

    def __init__(self) -> None:
        self.verbs: list[str] = []
        self.jobs: list[dict[str, Any]] = []
        self.left: list[dict[str, Any]] = []

    def call(self, verb: str, _: float, **arguments: Any) -> dict[str, Any]:
        self.verbs.append(verb)
        ads = self.jobs if verb == "query" else self.left
        where = classad2.ExprTree(arguments["constraint"])
        found = [ad for ad in ads if where.eval(classad2.ClassAd(ad)) is True]
        limit = arguments.get("limit", -1)
        return {"ads": found if limit < 0 else found[:limit]}

    def submit(self, *_: Any, file: str, **__: Any) -> int:
        self.verbs.append("submit")
        _, *items, _ = file[file.index("queue vmjobs_vm from (") :].splitlines()
        ours = {names.OWNER: "vmjobs", names.JOB_STATUS: 1}
        self.jobs += [{names.PROBE: item, **ours} for item in items]
        return 1


def test_many_vms_are_asked_about_in_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setattr("condor.submit.schedd.call", queue.call)
    monkeypatch.setattr("condor.submit.schedd.submit", queue.submit)
    pool = CondorPool("site", AT)
    known = [PoolVm(f"a-{n}", 2, f"{n:032x}") for n in range(200)]
    states = pool.probes(known)
    assert queue.verbs == ["query", "history", "submit"]
    assert states == {(each.id, 2): ProbeState.WAITING for each in known}
    queue.jobs.append({names.OWNER: "vmjobs", names.JOB_STATUS: 5})  # not a probe
    forged = {names.PROBE: "0" * 32 + ".2", names.JOB_STATUS: 4, names.EXIT_CODE: 0}
    queue.jobs.insert(0, {**forged, names.OWNER: "mallory"})
    queue.left.append({**forged, names.OWNER: "mallory"})
    queue.verbs.clear()
    assert pool.probes(known) == states
    assert queue.verbs == ["query"]
    # Two probes have left the queue, one of them twice: its last end counts, and comes first.
    first, second = queue.jobs.pop(1), queue.jobs.pop(1)
    queue.left = [
        {**first, names.JOB_STATUS: 4, names.EXIT_CODE: 0},
        {**first, names.JOB_STATUS: 3},
        {**second, names.JOB_STATUS: 3},
    ]
    queue.verbs.clear()
    said = pool.probes([*known, PoolVm("b-0", 1, "b" * 32)])
    assert queue.verbs == ["query", "history", "submit"]
    assert (said[known[0].id, 2], said[known[1].id, 2]) == (ProbeState.RAN, ProbeState.FAILED)
    assert said["b" * 32, 1] is ProbeState.WAITING
    assert [ad for ad in queue.jobs if ad.get(names.PROBE) == "b" * 32 + ".1"]
    assert len(queue.jobs) == 198 + 1 + 2


def withdrawn(machines: list[PoolVm], queue: Queue, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the calls to the pool's collector, by verb."""
    said: dict[str, Any] = {}
    patch.setattr("condor.submit.schedd.call", queue.call)
    patch.setattr("condor.pool.condor_pool.call", lambda verb, _, **more: said.update({verb: more}))
    CondorPool("site", AT, token_seconds=700).withdraw(machines)
    return said


def test_a_vm_is_withdrawn_by_its_name_and_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise root in a VM could claim another VM's id and so have that VM withdrawn."""
    queue = Queue()
    queue.jobs = [
        {"ClusterId": n, "ProcId": 0, names.PROBE: target, names.OWNER: "vmjobs", names.JOB_STATUS: 1}
        for n, target in enumerate(("5" * 32 + ".2", "5" * 32 + ".3", "7" * 32 + ".1"))
    ]
    removed: list[list[str]] = []
    monkeypatch.setattr("condor.submit.schedd.Schedd.act", lambda *what: removed.append(what[2]))
    machines = [PoolVm("a-0", 2, "5" * 32), PoolVm("a-1", 1, "6" * 32)]
    said = withdrawn(machines, queue, monkeypatch)
    assert list(said) == ["revoke", "withdraw"]  # otherwise a live VM could return in between
    users = [f"vmjobs-a-0.{'5' * 32}.2", f"vmjobs-a-1.{'6' * 32}.1"]
    assert (said["revoke"]["users"], said["revoke"]["seconds"] >= 700) == (users, True)
    assert removed == [["0.0"]]
    where = classad2.ExprTree(said["withdraw"]["constraint"])

    def goes(vm: str, target: str) -> Any:
        return where.eval(classad2.ClassAd({names.MEMBER: vm, names.MACHINE: target}))

    assert goes("a-0", "5" * 32 + ".2")
    assert goes("a-1", "6" * 32 + ".1")
    assert not goes("a-1", "5" * 32 + ".2")
    assert not goes("a-0", "5" * 32 + ".3")
    assert not goes("a-0", "7" * 32 + ".2")
    assert not goes("a-0/" + "5" * 32, "2")
    assert where.eval(classad2.ClassAd({names.MACHINE: "5" * 32 + ".2"})) is False


def test_thousands_of_vms_are_withdrawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "condor.submit.schedd.Schedd.query", lambda _, where, __: asked.append(where) or []
    )
    said = withdrawn([PoolVm(f"a-{n}", 1, f"{n:032x}") for n in range(5000)], Queue(), monkeypatch)
    ad = {names.MEMBER: "a-4999", names.MACHINE: f"{4999:032x}.1"}
    job = {names.OWNER: AT.user, names.PROBE: f"{4999:032x}.1"}
    for where, meant in ((said["withdraw"]["constraint"], ad), (asked[0], job)):
        assert classad2.ExprTree(where).eval(classad2.ClassAd(meant)) is True
        another = {
            key: value.replace("4999", "5000").replace("1387", "1388") for key, value in meant.items()
        }
        assert classad2.ExprTree(where).eval(classad2.ClassAd(another)) is False


def test_a_vm_wakes_no_cluster_by_posing_as_one_that_is_switched_off() -> None:
    config = (
        (Path(__file__).parents[2] / "condor/config/site-rooster.conf").read_text().replace("\\\n", " ")
    )
    (text,) = re.findall(r"^ROOSTER_UNHIBERNATE *= *(.*)$", config, re.MULTILINE)
    of_service = {"Offline": True, "Unhibernate": True, names.CLUSTER: "w"}
    of_service["MachineLastMatchTime"] = int(time.time())
    for ad, wakes in ((of_service, True), ({**of_service, names.MEMBER: "v-0"}, False)):
        assert classad2.ExprTree(text).eval(classad2.ClassAd(ad)) is wakes


def test_names_in_a_constraint_are_literals() -> None:
    text = membership_expression("A", ["x", 'y" || true || "'])
    for value, there in (("z", False), ("x", True)):
        assert classad2.ExprTree(text).eval(classad2.ClassAd({"A": value})) is there


def test_a_pool_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    pool = CondorPool("site", AT._replace(collector="127.0.0.1:9"), timeout=20.0)
    kind = WorkerVmProfile("a", 1, 512, 512, {}, "true", {})
    for attempt in (
        pool.vms,
        lambda: pool.probes([PoolVm("a-0", 1, "5" * 32)]),
        lambda: pool.withdraw([PoolVm("a-0", 1, "5" * 32)]),
        lambda: pool.idle([kind]),
        lambda: pool.offer([kind]),
    ):
        with pytest.raises(Unavailable, match=r"pool site: .*127\.0\.0\.1:9") as caught:
            attempt()
        assert caught.value.service == "pool"
    pool.withdraw([])
    assert pool.probes([]) == {}


def token(**claims: Any) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{payload}.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "made",
    [
        "",
        "a.b",
        "a.b.c",
        "a.!!.c",
        token(exp=1),
        token(sub="x"),
        token(sub="x", exp="soon"),
        token(sub="x", exp=10**30),
        "e30.W10.x",
        token(sub="condor@grid", exp=1),
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(made: str) -> None:
    with pytest.raises(ValueError, match="condor_token_create made") as caught:
        expiry(made, "x@grid" if "sub" not in made else "x")
    assert not made or made not in str(caught.value)


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Install a fake condor_token_create: this host may have none."""
    program = folder / "bin" / "condor_token_create"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


POOLS = {"site": "grid"}
MACHINE = PoolVm("a-0", 2, "5" * 32)


def test_what_a_token_is_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = f"vmjobs-a-0.{'5' * 32}.2"
    made = token(sub=f"{user}@grid", exp=1_800_000_000)
    programs(tmp_path, monkeypatch, f'echo "$*" >{tmp_path}/said; env >{tmp_path}/env; echo {made}')
    (tmp_path / "site").write_text("secret key")
    minted = CondorTokenIssuer(tmp_path, POOLS).mint("site", MACHINE, 600)
    assert minted.token == made
    assert minted.identity == f"{user}@grid"
    assert minted.expires == datetime.fromtimestamp(1_800_000_000, UTC)
    said = (tmp_path / "said").read_text().split()
    assert " ".join(said) == f"-key site -identity {user}@grid -authz ADVERTISE_STARTD -lifetime 600"
    environment = (tmp_path / "env").read_text()
    assert "_CONDOR_TRUST_DOMAIN=grid" in environment
    assert "secret key" not in environment


def test_no_key_no_pool_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minter = CondorTokenIssuer(tmp_path, POOLS)
    with pytest.raises(Unavailable, match="no signing key") as caught:
        minter.mint("site", MACHINE, 600)
    assert caught.value.service == "pool"
    with pytest.raises(Unavailable, match="known are: site"):
        minter.mint("other", MACHINE, 600)
    (tmp_path / "site").write_text("secret key")
    programs(tmp_path, monkeypatch, "echo cannot >&2; exit 1")
    with pytest.raises(Unavailable, match="cannot"):
        minter.mint("site", MACHINE, 600)
    for name in ("../x", "a b", "-a", "A", "a.b", ""):
        with pytest.raises(ValueError, match="not a valid"):
            minter.mint("site", replace(MACHINE, name=name), 600)
    for lie in (replace(MACHINE, id="5"), replace(MACHINE, incarnation=0)):
        with pytest.raises(ValueError, match="not a valid"):
            minter.mint("site", lie, 600)
