"""Secrets of jobs and of the service: planted, run through the grid, searched everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.kit.faults import AGENT
from tests.kit.grid import BOOT_SECONDS, NODES, PHYSICIST, Grid, wait_for
from tests.kit.secret_search import (
    HOSTS,
    STRANGER,
    TMP,
    Findings,
    feed,
    look_everywhere,
    needle,
    planted,
    watching_processes,
)
from tests.kit.submit_host import BY_CONDOR_C, Desk
from tests.kit.waiting import PATIENCE
from vmjobs.client import Client
from vmjobs.errors import VMJobsError
from vmjobs.model import HypervisorKind, Job, JobSpec, JobState, StreamName

JOBS = "rest-environment rest-script rest-input rest-out rest-err rest-bad unchanged-input "
JOBS += "unchanged-stdin unchanged-out unchanged-environment unchanged-argument refused wrong-token"

REST = """#!/bin/sh
# {script}
cat input >/dev/null; cat /proc/cmdline; echo "of the environment: $SECRET"; echo {out}; echo {err} >&2
sleep 20; exit {status}
"""
UNCHANGED = """
cat data /dev/stdin >seen; cat seen; echo {out}; echo "in the machine: $SECRET"; cat /proc/cmdline
sleep 4; exit $2
"""
#: Transparent jobs: expected exit status and image; and the hypervisor of the second, by its host.
ENDS = ((0, "generic"), (3, "generic"), (0, "no-such-image"))
OTHER_KIND = {"site": "qemu", "submit": "uml"}


class QuietDesk(Desk):
    """A desk that writes files through stdin, as every account can see arguments."""

    def write(self, name: str, text: str) -> None:
        # In one step: the job before may be about to take the file.
        command = 'cat >"$1.part" && mv "$1.part" "$1"'
        place = f"{self.folder}/{name}"
        feed(self.grid, self.host, text, "sh", "-c", command, "sh", place, user=PHYSICIST)


def service_secrets(grid: Grid) -> dict[str, str]:
    files = {
        "agent-token": ("node1", "/etc/vmjobs/token/token"),
        "rooster-token": ("site", "/etc/vmjobs/rooster/token"),
        "daemon-token": ("site", "/etc/condor/tokens.d/condor"),
        "node-token": ("node1", "/etc/condor/tokens.d/condor"),
        "condor-user-token": ("submit", "/home/vmjobs/.condor/tokens.d/vmjobs"),
        "pool-key": ("submit", "/etc/condor/passwords.d/POOL"),
        "cluster-key": ("site", "/etc/condor/passwords.d/site"),
        "database-password": ("postgres", "/run/secrets/vmjobs/password"),
    }
    found = {name: grid.on(service, "cat", path).strip() for name, (service, path) in files.items()}
    lines = grid.on("rabbitmq", "cat", "/etc/rabbitmq/conf.d/90-vmjobs.conf").splitlines()
    (found["broker-password"],) = (x.partition("= ")[2] for x in lines if x.startswith("default_pass "))
    key = grid.on("api", "sh", "-c", "cat /var/lib/vmjobs/data/keys/*")
    found["issuer-key"] = key.splitlines()[1]
    assert all(len(needle(secret)) >= 32 for secret in found.values())
    return found


@dataclass
class Tour:
    """Jobs that have run on the grid, and where their secrets were found.

    outs: output of the jobs that ran, the service's first. kernel: command line of the first job's VM.
    sentinel: the word that marks that VM's reports on its console.
    """

    grid: Grid
    findings: Findings
    answers: list[bytes] = field(default_factory=list)
    rest: list[Job] = field(default_factory=list)
    outs: list[str] = field(default_factory=list)
    kernel: str = ""
    sentinel: str = ""


@pytest.fixture(scope="module")
def tour(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tour]:
    secrets = {name: planted(name) for name in JOBS.split()} | service_secrets(grid)
    tokens = {
        n: grid.on("api", "vmjobs", "token", "create", "user", f"secrets-{n}").strip()
        for n in ("a", "b")
    }
    secrets["user-token"] = tokens["a"]
    made = Tour(grid, Findings(secrets))
    here, origin = QuietDesk(grid, "site"), QuietDesk(grid, "submit", BY_CONDOR_C)
    with (
        here,
        origin,
        Client(grid.url, tokens["a"]) as owner,
        Client(grid.url, tokens["b"]) as other,
    ):
        # A job's token becomes known on the way: the process data is searched afterwards.
        with watching_processes(grid, made.findings):
            _go(made, owner, (here, origin), tmp_path_factory.mktemp("input"))
        _ask(made, owner, other)
        look_everywhere(grid, made.findings)
        yield made


def _go(tour: Tour, owner: Client, desks: Sequence[Desk], folder: Path) -> None:
    """Run jobs that succeed, jobs that fail, and jobs that cannot run at all."""
    grid, secrets = tour.grid, tour.findings.secrets
    (folder / "input").write_text(secrets["rest-input"])
    sent = owner.upload_input(folder / "input")
    for status, hypervisor in ((0, HypervisorKind.UML), (3, HypervisorKind.QEMU)):
        words = {n: secrets[f"rest-{n}"] for n in ("script", "out", "err")}
        spec = JobSpec(
            image="generic", memory=192, disk=64, run_seconds=120, boot_seconds=BOOT_SECONDS,
            hypervisor=hypervisor, inputs=(sent,),
            environment={"SECRET": secrets["rest-environment"]},
            script=REST.format(status=status, **words),
        )  # fmt: skip
        tour.rest += owner.submit(spec).jobs
    broken = JobSpec(image="generic", memory=128, disk=64, script=f"#!/no/{secrets['rest-bad']}\n")
    tour.rest += owner.submit(broken).jobs
    # Both tokens exist only briefly, so nothing slow may come before.
    _learn_the_jobs_token(tour)
    _learn_the_guests_token(tour, owner)
    tour.kernel = wait_for(lambda: _machines(grid, owner, tour.rest[0]), "a job's machine", 240)
    clusters = [(desk, cluster) for desk in desks for cluster in _unchanged(desk, secrets)]
    ends = [desk.ended(cluster) for desk, cluster in clusters]
    held = [ad["HoldReason"] for ad in ends if ad["JobStatus"] == 5]
    assert [reason.partition(":")[0] for reason in held] == ["NOT_FOUND"] * len(desks), held
    assert [ad.get("ExitCode") for ad in ends if ad["JobStatus"] == 4] == [0, 3] * len(desks), ends
    tour.rest = grid_wait(owner, tour.rest)
    tour.outs = [b"".join(owner.stream(job.id, StreamName.OUT)).decode() for job in tour.rest[:2]]
    tour.outs += [desk.read(f"out.{number}") for desk in desks for number in (0, 1)]


def _unchanged(desk: Desk, secrets: dict[str, str]) -> Iterator[str]:
    fields: dict[str, Any] = {
        "environment": f'"SECRET={secrets["unchanged-environment"]}"',
        "input": "stdin",
    }
    desk("mkdir", "-p", desk.folder)
    desk.write("stdin", secrets["unchanged-stdin"])
    for number, (status, image) in enumerate(ENDS):
        # The script is the same for all: it is read when the job starts.
        script = UNCHANGED.format(out=secrets["unchanged-out"])
        fields["__VMJobHypervisor"] = f'"{OTHER_KIND[desk.host] if number == 1 else "uml"}"'
        fields["output"] = f"out.{number}"
        desk.describe(script, image, f"{secrets['unchanged-argument']} {status}", **fields)
        desk.write("data", secrets["unchanged-input"])
        yield desk.tool("condor_submit", "-terse", "job.sub").split(".")[0].strip()


def _learn_the_jobs_token(tour: Tour) -> None:
    job = tour.rest[0]
    place = f"/var/lib/vmjobs/spool/{job.array}/{job.id}/job.token"

    def look() -> str:
        return tour.grid.on("submit", "cat", place, check=False)

    tour.findings.secrets["job-token"] = wait_for(look, "the job's token", 120)
    mode = tour.grid.on("submit", "stat", "-c", "%a %U", place).split()
    assert mode == ["600", "vmjobs"]


def _learn_the_guests_token(tour: Tour, owner: Client) -> None:
    """Read the guest token of the first job's VM from its disk, which others cannot read."""
    grid, job = tour.grid, tour.rest[0]

    def look() -> tuple[str, str, dict[str, str]] | None:
        places = [f"{AGENT}/runs/{attempt}/job.disk" for attempt in _attempts(owner, job)]
        for node, place in product(NODES, places):
            said = grid.on(node, "tar", "-xOf", place, "job.env", check=False)
            told = dict(re.findall(r"(?m)^(VMJOBS_\w+)='([^']*)'$", said))
            if {"VMJOBS_TOKEN", "VMJOBS_SENTINEL"} <= told.keys():
                return node, place, told
        return None

    node, place, told = wait_for(look, "a job's disk", 120)
    assert not grid.on(node, "head", "-c", "100", place, user=STRANGER, check=False)
    tour.findings.secrets["guest-token"], tour.sentinel = told["VMJOBS_TOKEN"], told["VMJOBS_SENTINEL"]
    assert len(needle(told["VMJOBS_TOKEN"])) >= 32


def _attempts(owner: Client, job: Job) -> set[str]:
    return {event.attempt for event in owner.events(job.id) if event.attempt}


def _machines(grid: Grid, owner: Client, job: Job) -> str:
    """The command line of the job's VM; empty before it has one."""
    attempts = _attempts(owner, job)
    listed = [grid.on(node, "ps", "-eo", "args", user=STRANGER) for node in ("node1", "node2")]
    lines = [line for text in listed for line in text.splitlines() if "umid=" in line]
    return "\n".join(line for line in lines if any(attempt in line for attempt in attempts))


def grid_wait(owner: Client, jobs: list[Job]) -> list[Job]:
    ended = owner.wait([job.id for job in jobs], timeout=240 * PATIENCE)
    assert all(job.state.final for job in ended)
    return ended


def _ask(tour: Tour, owner: Client, other: Client) -> None:
    """Send requests that the service must refuse, and collect all its answers."""
    secrets, url = tour.findings.secrets, f"{tour.grid.url}/v1/jobs"
    token, bad = secrets["user-token"], secrets["refused"]
    spec = {"image": "generic", "script": "#!/bin/sh\n"}
    fields: list[dict[str, object]] = [
        {"environment": {"A": [bad]}},
        {"environment": {f"PASSWORD={bad}": ""}},
        {"environment": {"1": bad}},
        {"environment": {"A": f"{bad}\0"}},
        {"environment": bad},
        {"script": f"{bad}\0"},
        {"script": [bad]},
        {"inputs": [{"name": "x", "digest": bad, "size": 1}]},
        {"inputs": bad},
        {"user_data": [bad]},
        {"surprise": bad},
        {"arguments": [f"{bad}\0"]},
    ]
    bodies = [requests.Request("POST", url, json={"spec": spec | more}) for more in fields]
    bodies.append(
        requests.Request(
            "POST", url, data=f'{{"spec": {bad}', headers={"Content-Type": "application/json"}
        )
    )
    wrong = secrets["wrong-token"]
    heads = [
        f"Bearer {wrong}",
        f"Basic {wrong}",
        f"Bearer a {wrong}",
        f"Bearer {token}x",
        f"Bearer a.{wrong}.b",
    ]
    with requests.Session() as session:
        for wanted in bodies:
            wanted.headers["Authorization"] = f"Bearer {token}"
            _collect(tour, session, wanted, (400, 422))
        for head in heads:
            _collect(
                tour, session, requests.Request("GET", url, headers={"Authorization": head}), (401,)
            )
    for job in tour.rest:
        for ask in (other.job, other.events, other.outputs, other.cancel):
            with pytest.raises(VMJobsError) as refused:
                ask(job.id)
            tour.answers.append(repr(refused.value).encode())
    tour.answers.append(repr(list(other.jobs())).encode())
    tour.answers += [repr(owner.events(job.id)).encode() for job in tour.rest]
    tour.answers += [b"".join(owner.stream(job.id, StreamName.CONSOLE)) for job in tour.rest]


def _collect(
    tour: Tour, session: requests.Session, wanted: requests.Request, statuses: tuple[int, ...]
) -> None:
    asked = session.prepare_request(wanted)
    answer = session.send(asked, timeout=60, verify=os.environ["REQUESTS_CA_BUNDLE"])
    assert answer.status_code in statuses, (wanted.json, answer.text)
    tour.answers.append(str(answer.headers).encode() + answer.content)


#: What HTCondor shows of its own jobs (docs/node-security.md): an ad has environment and arguments, and
#: is kept in queues, histories and the log of the Condor-C GAHP.
ADS = ["ads:", "submit:/tmp/CGAHPLog.physicist"]
ADS += [f"{host}:/var/spool/condor/{file}" for host in HOSTS for file in ("job_queue.log", "history")]
ADS += [f"{node}:/var/log/condor/startd_history" for node in NODES]
#: A starter logs the commands that it starts.
STARTED = ["ps:", *(f"{node}:/var/log/condor/StarterLog" for node in NODES)]
STARTED += [f"logs:{node}" for node in NODES]
PUBLIC = [("unchanged-environment", place) for place in ADS]
PUBLIC += [("unchanged-argument", place) for place in ADS + STARTED]
#: Spooled files of Condor-C jobs, until they leave; only their owners can read them.
SPOOLED = re.compile(r"site:/var/spool/condor/\d+/")


def test_nothing_comes_to_light(tour: Tour) -> None:
    stores = [("job-token", "submit:/var/lib/vmjobs/spool/")]
    found = tour.findings.unexpected(PUBLIC + stores)
    found = [pair for pair in found if not SPOOLED.match(pair[1])]
    assert not found, "\n".join(map(" in ".join, found))


def test_a_stranger_finds_no_more_in_the_stores(tour: Tour) -> None:
    """Where root finds secrets stored for jobs, no other account on that host does."""
    seen = Findings(tour.findings.secrets)
    places = ("/var/spool", "/var/lib/vmjobs", "/var/lib/condor", "/etc", "/run", "/home", TMP)
    for service in HOSTS:
        seen.look_at_files(tour.grid, service, *places, user=STRANGER)
    mine = re.compile(r"\w+:/run/lock/unchanged-")  # the tests' own, in a directory that all may read
    found = [pair for pair in seen.unexpected(PUBLIC) if not mine.match(pair[1])]
    assert not found, "\n".join(map(" in ".join, found))


def test_what_is_public_is_found(tour: Tour) -> None:
    """The same search finds what HTCondor shows, so it would find the rest."""
    argument, environment = (
        tour.findings.places(f"unchanged-{n}") for n in ("argument", "environment")
    )
    assert {"ads:site:condor_history", "ads:submit:condor_history"} <= argument & environment
    assert argument & {"ps:node1", "ps:node2"}


def test_the_owner_sees_what_is_the_owners(tour: Tour) -> None:
    secrets = tour.findings.secrets
    assert secrets["rest-out"] in tour.outs[0]
    assert secrets["rest-environment"] in tour.outs[0]
    ends = [job.exit.code if job.exit else None for job in tour.rest[:2]]
    assert ends == [0, 3]
    assert tour.rest[2].state is not JobState.CANCELED


def test_answers_to_anybody_tell_no_secret(tour: Tour) -> None:
    seen = Findings(tour.findings.secrets)
    for answer in tour.answers:
        seen.look(answer.decode("utf-8", "replace")[:300], answer)
    # The reason why a script cannot start names its interpreter; only the owner is told.
    assert seen.unexpected([("rest-bad", "")]) == []


def test_kernels_are_told_nothing(tour: Tour) -> None:
    kernels = [line for out in tour.outs for line in out.splitlines() if "root=" in line]
    # Of each kind one job of the service and one of the site; all jobs of the origin's are UML's.
    for disk, count in (("/dev/ubda", 4), ("/dev/vda", 2)):
        assert sum(f"root={disk}" in line for line in kernels) == count, kernels
    assert "umid=" in tour.kernel
    seen = Findings(tour.findings.secrets)
    seen.look("kernel", "\n".join([*kernels, tour.kernel]).encode())
    assert seen.unexpected() == []


def test_the_tokens_disk_was_that_vms(tour: Tour) -> None:
    """The disk has the sentinel of the VM's console, which the owner may read."""
    assert [answer for answer in tour.answers if f"vmjobs:{tour.sentinel}:ready".encode() in answer]


def test_the_grid_can_search(tour: Tour) -> None:
    """The search finds a file with a secret."""
    grid, findings = tour.grid, Findings({"control": planted("control")})
    place = f"/var/log/{findings.secrets['control'][-8:]}.log"
    feed(grid, "site", findings.secrets["control"], "tee", place)
    try:
        findings.look_at_files(grid, "site", "/var/log")
    finally:
        grid.on("site", "rm", place)
    assert findings.places("control") == {f"site:{place}"}
