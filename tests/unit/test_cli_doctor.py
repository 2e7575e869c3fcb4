"""What ``vmjobs doctor`` finds on hosts with an incomplete set-up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from condor.names import POLICY_VERSION
from node.cli.doctor_condor import check_condor
from tests.kit.cli import Run
from tests.kit.http_server import Handler, Scripted

TOKEN = {"agent_token_file": "/nowhere"}
POOLS = {"pools": '{ site = "cm sched grid" }'}
KEYS = {"pool_key_dir": "/nowhere"}


Examine = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def examined(typed: Run) -> Examine:
    """Return a function that runs ``vmjobs doctor`` and returns its findings."""
    words = ("doctor", "--no-boot", "--json")
    return lambda *more, status=None: json.loads(typed(*words, *more, code=status).out)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"cluster_memory": 2048, "cluster_cpus": 2, **TOKEN}, None),
        (
            {"cluster_memory": 2048, **TOKEN},
            "cluster_memory is 2048, but cluster_cpus is 0: no cluster VM fits here; set both",
        ),
        (
            {"cluster_cpus": 2, "cluster_disk": 100},
            "cluster_cpus is 2, but cluster_memory is 0: no cluster VM fits here; set both",
        ),
        ({"cluster_disk": 100}, "cluster_disk is 100, but cluster_cpus and cluster_memory are 0"),
        (
            {"cluster_memory": 2048, "cluster_cpus": 2},
            "cluster_memory is set, but agent_token_file is not: the agent gets no cluster VMs",
        ),
        (POOLS, "pools is set, but pool_key_dir is not: VMs get no tokens from this service"),
        (KEYS, "pool_key_dir is set, but pools is not: no cluster can be declared"),
        ({**KEYS, **POOLS}, "the pool site has no key: the file /nowhere/site does not exist"),
    ],
)
def test_half_a_configuration_is_said_to_be(
    settings: dict[str, Any],
    said: str | None,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    examined: Examine,
) -> None:
    path.write_text(
        "\n".join(
            f"{name} = {value if isinstance(value, int) or value[0] == '{' else json.dumps(value)}"
            for name, value in settings.items()
        )
    )
    monkeypatch.setenv("VMJOBS_CONFIG", str(path))
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", "/nowhere")
    found = [f for f in examined() if f["what"] == "settings"]
    assert [(f["detail"], f["ok"]) for f in found] == ([(said, False)] if said else [])


NODE = {
    "DAEMON_LIST": "MASTER, STARTD",
    "STARTD_CRON_JOBLIST": " VMJOBS",
    "STARTD_CRON_VMJOBS_EXECUTABLE": "{folder}/job-wrapper",
    "START": f"(true) && (TARGET.VMJobImage =?= undefined || TARGET.VMJobPolicy =?= {POLICY_VERSION})",
    "USER_JOB_WRAPPER": "{folder}/job-wrapper",
    "RANK": "0.0",
    "MEMORY_USAGE_METRIC": "ifThenElse(ChirpVMMemoryBytes =!= undefined, 1, 2)",
}
SCHEDD = {
    "DAEMON_LIST": "MASTER SCHEDD",
    "JOB_TRANSFORM_NAMES": "Other VMJobs",
    "JOB_TRANSFORM_VMJobs": f"  SET VMJobPolicy {POLICY_VERSION}\n  SET VMJobWaits a\n"
    "  SET VMJobRank b\n  SET VMJobImageKnown c",
}
NEGOTIATOR = {
    "DAEMON_LIST": "MASTER NEGOTIATOR",
    "NEGOTIATOR_PRE_JOB_RANK": "Cpus + 1.0e9 * TARGET.VMJobRank",
}
ROUTER = {
    "DAEMON_LIST": "MASTER, SCHEDD, JOB_ROUTER",
    "JOB_TRANSFORM_NAMES": "VMJobsRoute",
    "JOB_ROUTER_ROUTE_NAMES": " VMJobs",
    "JOB_ROUTER_RELEASE_ON_HOLD": "FALSE",
    "VMJOBS_ROUTE": "condor site.grid cm.grid",
}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (NODE, []),
        ({"DAEMON_LIST": "MASTER, COLLECTOR"}, []),
        (SCHEDD, []),
        (
            {**SCHEDD, "JOB_TRANSFORM_VMJobs": "SET VMJobPolicy 1"},
            ["JOB_TRANSFORM_VMJobs is of another version of vmjobs (it sets no VMJobPolicy 2 and"],
        ),
        (NEGOTIATOR, []),
        (
            {**NEGOTIATOR, "NEGOTIATOR_PRE_JOB_RANK": "Cpus"},
            ["NEGOTIATOR_PRE_JOB_RANK has no VMJobRank"],
        ),
        ({"DAEMON_LIST": "MASTER, SCHEDD"}, ["JOB_TRANSFORM_NAMES has no VMJobs"]),
        ({"DAEMON_LIST": "MASTER, SCHEDD", "JOB_TRANSFORM_NAMES": "VMJobsLeaves"}, []),
        (ROUTER, []),
        ({**ROUTER, "DAEMON_LIST": "MASTER, SCHEDD"}, ["DAEMON_LIST has no JOB_ROUTER"]),
        ({**ROUTER, "JOB_ROUTER_ROUTE_NAMES": ""}, ["JOB_ROUTER_ROUTE_NAMES has no VMJobs"]),
        ({**ROUTER, "VMJOBS_ROUTE": "condor site.grid"}, ["VMJOBS_ROUTE is no"]),
        ({**ROUTER, "JOB_ROUTER_RELEASE_ON_HOLD": "true"}, ["JOB_ROUTER_RELEASE_ON_HOLD is not FALSE"]),
        ({**NODE, "STARTD_CRON_JOBLIST": "OTHER"}, ["STARTD_CRON_JOBLIST has no VMJOBS"]),
        (
            {**NODE, "STARTD_CRON_VMJOBS_EXECUTABLE": "/none/vmjobs"},
            ["STARTD_CRON_VMJOBS_EXECUTABLE: /none/vmjobs cannot be executed"],
        ),
        ({**NODE, "RANK": ""}, ["RANK is not set: the next job preempts"]),
        ({**NODE, "MEMORY_USAGE_METRIC": "1"}, ["MEMORY_USAGE_METRIC has no ChirpVMMemoryBytes"]),
        ({**NODE, "START": "true"}, ["START has no VMJobPolicy =?= "]),
        ({**ROUTER, "JOB_TRANSFORM_NAMES": "VMJobsRoute VMJobs"}, ["JOB_TRANSFORM_VMJobs is of"]),
        ({**NODE, "USER_JOB_WRAPPER": ""}, ["USER_JOB_WRAPPER is not set"]),
        ({**NODE, "USER_JOB_WRAPPER": "/x/other"}, ["USER_JOB_WRAPPER is /x/other"]),
        (
            {**NODE, "USER_JOB_WRAPPER": "/none/job-wrapper"},
            ["USER_JOB_WRAPPER: /none/job-wrapper cannot"],
        ),
        (
            {**NODE, "USER_JOB_WRAPPER": "{folder}/alone/job-wrapper"},
            ["{folder}/alone/ssh-to-job.sshd does not exist"],
        ),
        (
            {**NODE, "USER_JOB_WRAPPER": "{folder}/unlinked/job-wrapper"},
            ["{folder}/unlinked/python3 does not exist: no job gets a VM"],
        ),
        (
            {**NODE, "USER_JOB_WRAPPER": "{folder}/script/job-wrapper"},
            ["USER_JOB_WRAPPER: {folder}/script/job-wrapper is a script"],
        ),
    ],
)
def test_what_htcondor_lacks_for_unchanged_jobs(
    values: dict[str, str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(values, tmp_path, monkeypatch)
    told = [finding.detail for finding in check_condor() if not finding.ok]
    assert len(told) == len(said)
    begin = [start.format(folder=tmp_path) for start in said]
    assert all(fault.startswith(start) for fault, start in zip(told, begin, strict=True))


@pytest.mark.parametrize(
    ("values", "role", "status"),
    [
        (SCHEDD, "schedd", 0),
        ({**SCHEDD, "JOB_TRANSFORM_NAMES": ""}, "schedd", 1),
        ({**SCHEDD, "JOB_TRANSFORM_NAMES": ""}, "", 0),
        (NEGOTIATOR, "negotiator", 0),
        (NEGOTIATOR, "schedd", 1),
        (NODE, "node", 1),  # without an agent
    ],
)
def test_a_host_that_lacks_what_its_role_needs(
    values: dict[str, str],
    role: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    examined: Examine,
) -> None:
    configured(values, tmp_path, monkeypatch)
    monkeypatch.setenv("VMJOBS_SOCKET", str(tmp_path / "no.sock"))
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", str(tmp_path / "token"))
    found = examined(*(("--for", role) if role else ()), status=status)
    lacking = [f for f in found if f["role"] == role and not f["ok"]]
    assert bool(lacking) == bool(status)


def configured(values: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a condor_config_val that prints these values."""
    program = tmp_path / "condor_config_val"
    cases = "".join(
        f"{name}) echo '{value.format(folder=tmp_path)}' ;;\n" for name, value in values.items()
    )
    program.write_text(f"#!/bin/sh\ncase $1 in\n{cases}*) exit 1 ;;\nesac\n")
    whole = {"job-wrapper", "ssh-to-job.sshd", "exec-unchanged", "python3", "modules/condor"}
    lacking = {".": "", "alone": "ssh-to-job.sshd", "unlinked": "python3"}
    beside = [tmp_path / folder / name for folder, one in lacking.items() for name in whole - {one}]
    for file in (program, *beside, tmp_path / "script/job-wrapper"):
        file.parent.mkdir(exist_ok=True, parents=True)
        file.touch()
        file.chmod(0o755)
    (tmp_path / "script/job-wrapper").write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def _refusing(handler: Handler, _: int) -> None:
    """Serve as a healthy API that accepts one token."""
    if handler.path.endswith(("/healthz", "/health")):
        handler.document(200, {"status": "ok", "services": {}, "version": "1"})
    elif handler.headers["Authorization"] == "Bearer good":
        handler.problem(404, "NOT_FOUND", "there is none")
    else:
        handler.problem(401, "UNAUTHENTICATED", "the token has expired")


@pytest.mark.parametrize(
    ("token", "said"), [("good", ""), ("old", "the token has expired"), ("\N{SNOWMAN}", "cannot read")]
)
def test_a_token_that_the_service_refuses_is_found(
    token: str,
    said: str,
    server: Scripted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    examined: Examine,
) -> None:
    server.script = _refusing
    (tmp_path / "token").write_text(token, "utf-8")
    monkeypatch.setenv("VMJOBS_API_URL", server.url)
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", str(tmp_path / "token"))
    configured(NODE, tmp_path, monkeypatch)
    monkeypatch.setenv("VMJOBS_AGENT_TOKEN_FILE", str(tmp_path / "token"))
    found = {f["what"]: f for f in examined()}
    for what in ("API", "agent's token"):
        assert (found[what]["ok"], said in found[what]["detail"]) == (not said, True), found[what]


def test_a_node_without_an_account_or_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examined: Examine
) -> None:
    configured(NODE, tmp_path, monkeypatch)
    monkeypatch.setenv("VMJOBS_JOB_USERS", "root no-such-account")
    monkeypatch.setenv("VMJOBS_STATE_DIR", str(tmp_path / "none"))
    found = {f["what"]: f for f in examined("--for", "node")}
    assert not found["account"]["ok"]
    assert "no account no-such-account" in found["account"]["detail"]
    assert not found["disk"]["ok"]


def test_a_check_that_fails_is_a_finding_among_the_others(
    monkeypatch: pytest.MonkeyPatch, examined: Examine
) -> None:
    def fails() -> None:
        raise PermissionError(13, "Permission denied", "/usr/share/ovmf")

    monkeypatch.setattr("vmjobs.hypervisor.libvirt.firmware.find", fails)
    found = {f["what"]: f for f in examined()}
    assert "Permission denied" in found["UEFI firmware"]["detail"]
    assert "sandbox" in found
