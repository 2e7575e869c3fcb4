"""Descriptions of jobs for condor_submit, and CondorScheduler as far as it needs no schedd."""

from __future__ import annotations

import fcntl
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import classad2
import htcondor2
import pytest

from condor import names
from condor.events import outcomes
from condor.submit.description import (
    JobProgram,
    accounting_name,
    argument_string,
    classad_string,
    describe,
    grid_resource,
    plain,
    rank,
    requirements,
)
from condor.submit.scheduler import CondorScheduler
from tests.kit.hostile_strings import HOSTILE
from vmjobs.batch import BatchJob
from vmjobs.config import Config
from vmjobs.errors import ConfigError, InvalidSpec, Unavailable
from vmjobs.model import CondorRef, HypervisorKind, JobAction, JobSpec, NetworkMode

DIGEST = "sha256:" + "ab" * 32


def config(**settings: Any) -> Config:
    routes = {"site": "condor site.grid site.grid:9618", "here": ""}
    return Config(spool_dir=Path("/spool"), routes=routes, **settings)


def batch(count: int = 1, owner: str = "alice", **fields: Any) -> list[BatchJob]:
    spec = JobSpec(image=DIGEST, script="#!/bin/sh\n", **fields)
    return [BatchJob(f"j{i}", "arr", i, owner, spec, "token") for i in range(count)]


def parsed(jobs: list[BatchJob], settings: Config | None = None) -> htcondor2.Submit:
    (submission,) = describe(jobs, settings or config(), JobProgram())
    return htcondor2.Submit(submission.description)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_has_no_meaning_left(text: str) -> None:
    if "\ud800" in text:
        with pytest.raises(UnicodeEncodeError):
            text.encode()
        text = text.encode("utf-8", "replace").decode()
    found = plain(text)
    assert len(found) <= 256
    assert found.isascii()
    assert found.isprintable()
    assert not set(found) & set("$\"'\\()[]{};`\n")
    assert str(classad2.ExprTree(classad_string(text)).eval()) == found


@pytest.mark.parametrize("text", [t for t in HOSTILE if "\ud800" not in t])
def test_hostile_names_and_owners_change_nothing_but_their_own_attribute(text: str) -> None:
    benign = parsed(batch(name="name", route="site"))
    submit = parsed(batch(name=text[:128], owner=text, route="site"))
    own = {"MY.VMJobsName", "MY.VMJobsOwner", "batch_name", "accounting_group_user"}
    assert set(submit) == set(benign)
    for key in set(submit) - own:
        assert submit[key] == benign[key], key
    for key in own:
        assert submit.expand(key) == submit[key].strip()
    assert classad2.ExprTree(submit["MY.VMJobsOwner"]).eval() == plain(text)


def test_items_carry_the_ids_and_nothing_else() -> None:
    (submission,) = describe(batch(3), config(), JobProgram())
    assert [list(item.values()) for item in submission.items] == [
        [f"j{i}", "arr", str(i), "0"] for i in range(3)
    ]
    assert submission.text().endswith(
        "\nqueue vmjobs_id,vmjobs_array,vmjobs_index,vmjobs_part from (\n"
        "j0 arr 0 0\nj1 arr 1 0\nj2 arr 2 0\n)\n"
    )


def test_arrays_that_differ_are_one_cluster_for_each_place() -> None:
    arrays = {
        "a": batch(2, name="one"),
        "b": batch(1, "bob", name="two", memory=64),
        "c": batch(1, route="site"),
    }
    jobs = [replace(job, id=f"{a}{job.id}", array=a) for a, jobs in arrays.items() for job in jobs]
    local, remote = describe(jobs, config(), JobProgram())
    assert [item["vmjobs_id"] for item in local.items + remote.items] == [job.id for job in jobs]
    assert remote == describe(jobs[-1:], config(), JobProgram())[0]
    for item in (local.items[0], local.items[-1]):
        together = htcondor2.Submit({**item, **local.description})
        alone = describe(
            [job for job in jobs if job.array == item["vmjobs_array"]], config(), JobProgram()
        )
        for key in htcondor2.Submit(alone[0].description):
            assert together.expand(key) == htcondor2.Submit({**item, **alone[0].description}).expand(
                key
            )


@pytest.mark.parametrize("bad", ["", "../x", "a b", "a$(x)", "a\n", "a" * 65, "a/b", '"'])
def test_ids_must_be_plain(bad: str) -> None:
    (good,) = batch()
    for job in (replace(good, id=bad), replace(good, array=bad)):
        with pytest.raises(ValueError, match="not the id"):
            describe([job], config(), JobProgram())


def test_the_environment_of_a_job_is_for_its_guest_alone() -> None:
    """No program on the node gets it."""
    hostile = {"LD_PRELOAD": "./evil.so", "PYTHONPATH": "evil"}
    for route in ("local", "site"):
        (submission,) = describe(batch(route=route, environment=hostile), config(), JobProgram())
        assert [submission] == describe(batch(route=route), config(), JobProgram())
        assert not any(word in str(submission) for word in ("LD_PRELOAD", "PYTHONPATH", "evil"))


def test_the_local_pool_and_a_site_differ_where_they_must() -> None:
    local, remote = parsed(batch(route="local")), parsed(batch(route="site"))
    assert local["universe"] == "vanilla"
    assert "HasVMJobs" in local["requirements"]
    assert "grid_resource" not in set(local)
    assert remote["universe"] == "grid"
    assert remote["grid_resource"] == "condor site.grid site.grid:9618"
    assert remote["MY.remote_Requirements"] == local["requirements"]
    assert remote["MY.remote_WantIOProxy"] == "true"
    for submit in (local, remote):
        assert submit["executable"] == "/usr/bin/vmjobs"
        assert submit["arguments"] == "\"'exec' '--job' '$(vmjobs_id)'\""
        assert submit["transfer_input_files"] == names.TOKEN
        assert submit["log"] == "/spool/$(vmjobs_array)/events.log"
        assert submit["initialdir"] == "/spool/$(vmjobs_array)/$(vmjobs_id)"
        assert submit["request_disk"] == str(1024 * 1024)


def test_who_is_to_be_saved_has_time_for_it() -> None:
    for wish, seconds in ((True, "600"), (False, "60")):
        asked = {"checkpoint": wish, "hypervisor": "qemu" if wish else None}
        local, remote = (parsed(batch(route=route, **asked)) for route in ("local", "site"))
        for submit in (local, remote):
            assert submit["job_max_vacate_time"] == seconds
            assert submit["kill_sig"] == "SIGTERM"
        assert remote["MY.remote_JobMaxVacateTime"] == seconds
        assert remote["MY.remote_KillSig"] == '"SIGTERM"'


def test_routes() -> None:
    assert grid_resource(config(), "") == ""
    assert grid_resource(config(), "here") == ""
    assert grid_resource(config(default_route="site"), "").startswith("condor site.grid")
    with pytest.raises(InvalidSpec) as caught:
        grid_resource(config(), "nowhere")
    assert caught.value.faults[0].field == "spec.route"
    assert grid_resource(Config(routes={"x": "condor a \n b"}), "x") == "condor a b"
    for bad in ("batch slurm", "condor a", "condor a b c", "condor a b\nqueue 9", "condor $(x) b"):
        with pytest.raises(ConfigError):
            grid_resource(Config(routes={"x": bad}), "x")


def slot(**attributes: Any) -> classad2.ClassAd:
    base = {"HasVMJobs": True, "HasFileTransfer": True, "Cpus": 4, "Memory": 4096, "Disk": 9999999}
    base |= {"Name": "slot1@node9.grid", "VMJobsHypervisors": "uml,qemu"}
    return classad2.ClassAd({**base, **attributes})


def matches(expression: str, machine: classad2.ClassAd, **more: str) -> Any:
    job = classad2.ClassAd({"RequestCpus": 2, "RequestMemory": 512, "RequestDisk": 1024, **more})
    return classad2.ExprTree(expression).eval(job, machine)


def test_an_image_goes_where_it_can_be_booted() -> None:
    spec = batch(cpus=1)[0].spec
    disk = (HypervisorKind.KVM, HypervisorKind.QEMU)
    assert requirements(spec, tuple(HypervisorKind)) == requirements(spec)
    assert matches(requirements(spec, disk), slot(VMJobsHypervisors="uml")) is False
    assert matches(requirements(spec, disk), slot(VMJobsHypervisors="uml,qemu")) is True
    assert matches(requirements(spec, disk), slot(VMJobsHypervisors="kvm")) is True
    assert matches(requirements(spec, (HypervisorKind.UML,)), slot(VMJobsHypervisors="kvm")) is False
    uml = batch(hypervisor="uml")[0].spec
    with pytest.raises(InvalidSpec, match="cannot be booted by uml, but by kvm or qemu"):
        requirements(uml, disk)
    (described,) = describe([BatchJob("j", "a", 0, "o", spec, "t", disk)], config(), JobProgram())
    assert '"kvm"' in described.description["requirements"]


def test_an_image_with_cloud_init_goes_where_its_data_can_be_read() -> None:
    spec = batch(cpus=1)[0].spec
    for kinds in ((), (HypervisorKind.UML,), tuple(HypervisorKind)):
        wanted = requirements(spec, kinds, cloud_init=True)
        assert matches(wanted, slot(VMJobsHypervisors="uml")) is False  # an agent of an earlier release
        assert matches(wanted, slot(VMJobsHypervisors="uml", VMJobsUmlCloudInit=False)) is False
        assert matches(wanted, slot(VMJobsHypervisors="uml", VMJobsUmlCloudInit=True)) is True
    assert matches(requirements(spec, cloud_init=True), slot(VMJobsHypervisors="uml,qemu")) is True


def test_a_job_goes_where_its_processors_are() -> None:
    spec = batch(cpus=2)[0].spec
    for offered in ({}, {"VMJobsUmlCpus": 1}):  # an agent of an earlier release; Debian's kernel
        assert matches(requirements(spec), slot(VMJobsHypervisors="uml", **offered)) is False
        assert matches(requirements(spec), slot(VMJobsHypervisors="uml,qemu", **offered)) is True
    assert matches(requirements(spec), slot(VMJobsHypervisors="uml", VMJobsUmlCpus=64)) is True
    assert (
        matches(requirements(batch()[0].spec), slot(VMJobsHypervisors="uml", VMJobsUmlCpus=1)) is True
    )
    with pytest.raises(InvalidSpec, match="only uml boots the image, with at most 64 processors"):
        requirements(batch(cpus=65)[0].spec, (HypervisorKind.UML,))
    with pytest.raises(InvalidSpec, match="a uml VM has at most 64 processors, but 65 are requested"):
        requirements(batch(cpus=65, hypervisor="uml")[0].spec)


def test_a_job_goes_where_it_has_its_network() -> None:
    default, outbound = (batch(**more)[0].spec for more in ({}, {"network": NetworkMode.OUTBOUND}))
    inside = slot(VMJobsNetworks="none,repository")
    assert matches(requirements(default), inside) is True
    assert matches(requirements(outbound), inside) is False
    assert matches(requirements(outbound), slot(VMJobsNetworks="none,repository,outbound")) is True
    assert matches(requirements(default), slot(VMJobsNetworks="none")) is False
    none = batch(network=NetworkMode.NONE)[0].spec
    assert matches(requirements(none), slot(VMJobsNetworks="none")) is True
    assert matches(requirements(outbound), slot()) is True, "an agent of an earlier release"


def test_an_image_goes_where_its_machine_code_runs() -> None:
    """HTCondor's names of architectures are those of uname, except for their case."""
    spec = batch()[0].spec
    for architecture, there, runs in (
        ("x86_64", "X86_64", True),
        ("x86_64", "aarch64", False),
        ("aarch64", "aarch64", True),
        ("", "aarch64", True),
    ):
        found = matches(requirements(spec, (), architecture), slot(Arch=there))
        assert found is runs, (architecture, there)
    emulator = slot(Arch="X86_64", VMJobsArchitectures="aarch64,s390x")
    assert matches(requirements(spec, (), "s390x"), emulator) is True
    demanding = spec.model_copy(update={"hypervisor": HypervisorKind.UML})
    with pytest.raises(InvalidSpec, match="cannot be booted by uml, but by qemu"):
        requirements(demanding, (HypervisorKind.QEMU,), "s390x")


@pytest.mark.parametrize(
    ("route", "prefix", "wanted"),
    [("local", "MY.", "requirements"), ("site", "MY.remote_", "MY.remote_Requirements")],
)
def test_a_job_that_a_node_failed_waits_for_longer_each_time(
    route: str, prefix: str, wanted: str
) -> None:
    submit = parsed(batch(route=route))

    def matched(starts: int, **told: object) -> object:
        asked = {"RequestCpus": 1, "RequestMemory": 64, "RequestDisk": 1024}
        job = classad2.ClassAd({**asked, "NumJobStarts": starts, **told})
        job[names.WAITS] = classad2.ExprTree(submit[prefix + names.WAITS])
        return classad2.ExprTree(submit[wanted]).eval(job, slot())

    assert matched(0) is True
    assert matched(3) is True, "it was vacated"
    for starts, ago, runs in ((1, 2, False), (1, 7, True), (3, 15, False), (3, 22, True)):
        told = outcomes.node_failure_attributes(time.time() - ago)
        assert matched(starts, **told) is runs, (starts, ago)


def test_requirements_and_rank_against_machine_ads() -> None:
    spec = batch()[0].spec
    uml = batch(hypervisor=HypervisorKind.UML)[0].spec
    kvm = batch(hypervisor=HypervisorKind.KVM)[0].spec
    assert matches(requirements(spec), slot()) is True
    assert matches(requirements(spec), slot(HasVMJobs=False)) is False
    assert matches(requirements(spec), slot(Memory=511)) is False
    assert matches(requirements(uml), slot()) is True
    assert matches(requirements(kvm), slot()) is False
    assert matches(requirements(kvm), slot(VMJobsHypervisors="")) is False
    assert matches(requirements(spec), slot(VMJobsMemory=511)) is False
    assert matches(requirements(spec), slot(VMJobsDisk=1, VMJobsMemory=512)) is True
    assert matches(requirements(spec), slot(VMJobsDisk=0)) is False
    assert matches(rank(DIGEST), slot(VMJobsImageDigests=f"x,{DIGEST}")) == 1
    assert matches(rank(DIGEST), slot()) == 0
    assert matches(rank("generic:1"), slot()) == 0


def test_accounting_tells_owners_apart() -> None:
    assert accounting_name("alice") == "alice"
    odd = {accounting_name(name) for name in ("a b", "a$b", "a@b", "a.b@c", "x" * 65, "x" * 66, "")}
    assert len(odd) == 7
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in odd)
    submit = parsed(batch(accounting_group="physics"), config(accounting_group="default"))
    assert submit["accounting_group"] == "physics"
    assert submit["accounting_group_user"] == "alice"
    assert parsed(batch(), config(accounting_group="default"))["accounting_group"] == "default"
    with pytest.raises(InvalidSpec):
        parsed(batch(), config(accounting_group="a\nqueue"))


def test_arguments_are_quoted() -> None:
    assert argument_string(["a", "b c", "it's", 'say "x"', "$HOME", ""]) == (
        "\"'a' 'b c' 'it''s' 'say \"\"x\"\"' '$(DOLLAR)HOME' ''\""
    )
    for bad in ("a\nb", "a\0", "a\rb", "$$(x)", "$$"):
        with pytest.raises(ValueError, match="an argument has"):
            argument_string([bad])


def test_a_spool_directory_that_would_break_quoting_is_refused() -> None:
    for bad in ("/spool $(x)", '/a"b', "/a b"):
        with pytest.raises(ValueError, match="special"):
            describe(batch(), Config(spool_dir=Path(bad)), JobProgram())


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CondorScheduler:
    """A scheduler whose collector does not answer."""
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    config = Config(spool_dir=tmp_path / "spool", schedd_name="s.grid", schedd_pool="127.0.0.1:9")
    return CondorScheduler(config, timeout=20.0)


def test_a_submission_that_fails_leaves_its_marker(scheduler: CondorScheduler, tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        scheduler.submit(batch())
    assert caught.value.service == "schedd"
    assert "127.0.0.1:9" in caught.value.message
    array = tmp_path / "spool" / "arr"
    token = array / "j0" / names.TOKEN
    assert (array / names.SUBMIT_MARKER).exists()
    assert token.read_text() == "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert array.stat().st_mode & 0o777 == 0o700
    assert not list(array.rglob("*.new"))
    with pytest.raises(Unavailable):
        scheduler.submit(batch())
    scheduler.forget("arr")
    assert not array.exists()
    scheduler.forget("arr")


def test_a_submission_that_outlives_its_worker_is_waited_for(tmp_path: Path) -> None:
    config = Config(spool_dir=tmp_path, schedd_pool="127.0.0.1:9")
    with (tmp_path / names.LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        left = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
    try:
        with pytest.raises(Unavailable, match="an earlier submission is still running"):
            CondorScheduler(config, timeout=0.2).submit(batch())
        assert not (tmp_path / "arr").exists()
    finally:
        left.kill()
        left.wait()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        CondorScheduler(config, timeout=20.0).submit(batch())


def test_a_spec_that_cannot_be_described_writes_nothing(
    scheduler: CondorScheduler, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec):
        scheduler.submit(batch(route="nowhere"))
    assert not (tmp_path / "spool").exists()
    assert scheduler.submit([]) == {}


def test_every_call_says_which_daemon_does_not_answer(scheduler: CondorScheduler) -> None:
    jobs = [CondorRef(schedd="s.grid", cluster=1, proc=0)]
    for ask in (lambda: scheduler.query(["j0"]), lambda: scheduler.act(JobAction.CANCEL, jobs, "why")):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            ask()
    scheduler.act(JobAction.HOLD, [], "why")
    assert scheduler.query([]) == []
    assert scheduler.watch(["a"]) == []


@pytest.mark.parametrize("bad", ["..", "a/b", "", "a b"])
def test_ids_stay_inside_of_the_spool(scheduler: CondorScheduler, bad: str) -> None:
    for use in (scheduler.forget, lambda bad: scheduler.query([bad])):
        with pytest.raises(ValueError, match="not the id"):
            use(bad)
