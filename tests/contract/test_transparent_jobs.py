"""Transparent jobs in real VMs: the agent, `exec-unchanged`, a guest."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kit.agent_node import BOOT, GID, UID, AgentNode
from tests.kit.chirp_service import IDLE, ChirpService
from tests.kit.hypervisors import kill_all
from tests.kit.waiting import wait_until
from tests.kit.wrapper import build_evil
from vmjobs.hypervisor.base import VmState
from vmjobs.model import MIB

pytest_plugins = ["tests.kit.agent_node"]


def test_it_is_the_same_job_in_there(node: AgentNode) -> None:
    script = """
        id -u; id -g; id -un; pwd; echo "$GREETING"; cat data/in; cat; ls -A | grep -c condor_std
        grep -q "hostfs\\|ubd" /proc/cmdline && echo machine
        echo "to you" >&2; exit 3
    """
    job = node.run(
        "/bin/sh",
        "-c",
        script,
        files={"data/in": b"from a file\n"},
        environment={"GREETING": "two\nlines 'quoted' $HOME", "odd.name": "x"},
        given=b"from standard input\n",
    )
    lines = [str(UID), str(GID), f"u{UID}", str(job.place), "two", "lines 'quoted' $HOME"]
    lines += ["from a file", "from standard input", "0", "machine"]
    assert job.out.splitlines() == lines, job.err
    assert job.err == "to you\n"
    assert job.status == 3


def test_arguments_and_variables_pass_untouched(node: AgentNode) -> None:
    program = b"#!/bin/sh\nprintf '<%s>' \"$@\"\necho\ntr '\\0' '\\n' </proc/$$/environ\n"
    words = ["", " a  b ", "it's", '"', "\\", "$(id)", "*", "new\nline", "-x", "é"]
    job = node.run(
        "./pro=gram",
        *words,
        files={"pro=gram": program},
        environment={"odd.name": "1", "odd-name": "2"},
        prepare=lambda place: (place / "pro=gram").chmod(0o755),
    )
    assert job.status == 0, job.err
    assert job.out.startswith("".join(f"<{word}>" for word in words))
    assert {"odd.name=1", "odd-name=2"} <= set(job.out.splitlines())


def test_variables_that_command_programs_are_the_jobs_alone(node: AgentNode, tmp_path: Path) -> None:
    """They affect no program on the node; the guest has them all, unmodified."""
    mark = tmp_path / "mark"
    evil = build_evil(tmp_path, mark).read_bytes()
    said = {
        "LD_PRELOAD": "./evil.so",
        "LD_AUDIT": "./none.so",
        "LD_LIBRARY_PATH": ".",
        "PYTHONHOME": "/none",
        "BASH_ENV": "./words",
        "GLIBC_TUNABLES": "glibc.malloc.check=3",
        "IFS": "/",
        "ODD": "a\nb",
    }
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    # (Busybox is a static program; this shell need not be.)
    command = ("/bin/busybox", "cat", "/proc/self/environ")
    ad = 'VMJobImage = "generic"'
    job = node.run(*command, ad=ad, files={"evil.so": evil}, environment=with_ad(said), wrapped=True)
    assert job.status == 0, job.err
    assert not mark.exists()
    found = dict(word.split("=", 1) for word in job.out.split("\0")[:-1])
    assert {name: found.get(name) for name in said} == said
    assert found.keys() - said.keys() == {"_CONDOR_SCRATCH_DIR", "_CONDOR_JOB_AD", "PATH"}


def with_ad(variables: dict[str, str]) -> dict[str, str]:
    """Add the variable by which the wrapper finds the ad in the job's directory."""
    return {**variables, "_CONDOR_JOB_AD": ".job.ad"}


def test_links_that_lead_out_lead_to_files_of_the_guest(node: AgentNode, chirp: ChirpService) -> None:
    """On the node, HTCondor would follow them to files of the node."""
    script = """
        mkdir -p in/deep; echo mine >in/file; echo x >/tmp/outside; chmod 640 /tmp/outside
        ln -s /etc/passwd a; ln -s ../../../../../../../../etc/passwd in/deep/b; ln -s /tmp t
        ln -s t/outside c; ln -s c chain; ln -s a hard; ln hard hard2
        ln -s "$PWD/in/file" absolute; ln -s in/deep/../file crooked; ln -s ../file in/deep/up
        ln -s in/file plain; ln -s plain plainer; ln -s . in/self
        ln -s /nothing none; ln -s loop loop; ln -s /dev/zero device; mkfifo fifo; ln -s fifo tofifo
        ln -s /etc/shadow secret; ln -s "$PWD/in" 'odd
'
        cat /etc/passwd
    """
    job = node.run("/bin/sh", "-c", script, files={".chirp.config": chirp.config})
    assert job.status == 0, job.err
    place = job.place
    for name in ("a", "in/deep/b", "hard", "hard2"):
        assert (place / name).read_text() == job.out, name
        assert not (place / "a").is_symlink()
    assert (place / "c").read_text() == (place / "chain").read_text() == "x\n"
    assert (place / "c").stat().st_mode & 0o777 == 0o640
    for name in ("absolute", "crooked", "in/deep/up", "plain", "plainer", "in/self/file", "odd\n/file"):
        assert (place / name).read_text() == "mine\n", name
    assert (place / "absolute").readlink() == Path("in/file")
    assert (place / "plainer").readlink() == Path("plain")
    for path in place.rglob("*"):
        assert path.resolve().is_relative_to(place), path
    said = chirp.attributes["ChirpVMRejected"]
    for name in ("none", "loop", "device", "fifo", "tofifo", "secret", "t"):
        assert not os.path.lexists(place / name), name
        assert f"'{name}': " in said, said
    assert said.count(";") == 6, said


def test_changes_come_back_and_nothing_else(node: AgentNode) -> None:
    """A directory that was moved comes with all it holds."""
    script = """
        echo more >>changed; rm gone; mkdir -p made/deep; echo new >made/deep/file; ln -s made link
        chmod 750 made; mv moved elsewhere; echo x >'odd
name'; touch -d 2001-01-01 old; ln changed second; rm -r was && echo now >was; mkfifo pipe
        mv data results; mv one t; mv two one; mv t two; mkdir ro; echo x >ro/f; chmod 555 ro
    """
    files = {"changed": b"one\n", "gone": b"", "moved": b"m", "same": b"same", "was/a": b"1"}
    files |= {"data/a": b"a", "data/deep/b": b"b", "one/x": b"1", "two/x": b"2"}

    def age(place: Path) -> None:
        os.utime(place / "same", (1, 1))

    job = node.run("/bin/sh", "-c", script, files=files, prepare=age)
    assert job.status == 0, job.err
    place = job.place
    assert (place / "changed").read_text() == "one\nmore\n"
    assert not (place / "gone").exists()
    assert not (place / "moved").exists()
    assert (place / "elsewhere").read_bytes() == b"m"
    assert (place / "made/deep/file").read_text() == "new\n"
    assert (place / "made").stat().st_mode & 0o7777 == 0o750
    assert (place / "link").readlink() == Path("made")
    assert (place / "odd\nname").read_text() == "x\n"
    assert (place / "old").stat().st_mtime < 1e9
    assert (place / "second").samefile(place / "changed")
    assert (place / "was").read_text() == "now\n"
    assert (place / "same").stat().st_mtime == 1
    assert not (place / "pipe").exists()
    assert not (place / "data").exists()
    assert (place / "results/a").read_text() == "a"
    assert (place / "results/deep/b").read_text() == "b"
    assert ((place / "one/x").read_text(), (place / "two/x").read_text()) == ("2", "1")
    assert (place / "ro/f").read_text() == "x\n"
    (place / "ro").chmod(0o755)
    mine = [path for path in place.iterdir() if not path.name.startswith("_condor_")]
    assert {path.stat(follow_symlinks=False).st_uid for path in mine} == {UID}


def test_a_job_that_removes_all_removes_nothing_of_the_starters(node: AgentNode) -> None:
    job = node.run("/bin/sh", "-c", "find . -mindepth 1 -delete; echo 'a b c' >.chirp.config")
    assert job.status == 0, job.err
    assert {".job.ad", ".machine.ad"} <= {path.name for path in job.place.iterdir()}
    assert not (job.place / ".chirp.config").exists()


@pytest.mark.parametrize(
    ("words", "status", "state", "reason"),
    [
        ("exit 0", 0, "COMPLETED", "SUCCEEDED: the job exited with status 0"),
        ("exit 137", 137, "FAILED", "JOB_FAILED: the job exited with status 137"),
        ("kill -9 $$", -9, "FAILED", "JOB_KILLED: the job was killed by signal 9"),
    ],
)
def test_ends_as_the_job_ends(
    node: AgentNode, chirp: ChirpService, words: str, status: int, state: str, reason: str
) -> None:
    job = node.run("/bin/sh", "-c", words, files={".chirp.config": chirp.config})
    assert job.status == status
    assert chirp.shown() == (state, reason)
    # One line of the job's log each for STAGING, BOOTING, RUNNING, COLLECTING and its end.
    assert chirp.events == ["ChirpVMState"] * 5


def test_what_a_job_leaves_running_ends_with_it(node: AgentNode) -> None:
    """The guest's kernel survives it, even while it starts processes for them."""
    script = "for n in 1 2 3; do (while :; do (:) & wait; done) & done; sleep 1; echo ended; exit 3"
    job = node.run("/bin/sh", "-c", script)
    assert (job.status, job.out) == (3, "ended\n"), job.err


def cost_of_python() -> float:
    """Return the processor seconds of a Python program that does nothing."""
    program = subprocess.Popen([sys.executable, "-IS", "-c", "import json, tempfile, threading"])
    _, _, used = os.wait4(program.pid, 0)
    program.returncode = 0
    return used.ru_utime + used.ru_stime


def test_what_stands_for_a_job_is_small(node: AgentNode) -> None:
    """At most 40 ms on an idle node: bench/beside.py. Beside other tests: at most three times a program
    that does nothing; it was 20 times when it imported all of vmjobs."""
    compileall.compile_dir(node.folder / "modules" / "condor", quiet=2)
    costs = [(node.cost("/bin/true"), cost_of_python()) for _ in range(3)]
    assert min(job for job, _ in costs) < 5 * min(python for _, python in costs)
    job = node.resident("echo up; sleep 1000")
    assert job.memory < 10 * MIB
    node.end(job)


def test_a_program_that_is_not_there(node: AgentNode) -> None:
    job = node.run("./nothing")
    assert job.status == 127
    assert "nothing" in job.err


def test_the_ad_of_a_job_that_was_cut_short_does_not_say_that_it_runs(
    node: AgentNode, chirp: ChirpService
) -> None:
    """A killed program cannot report; HTCondor itself shows the job as idle then."""
    files = {".chirp.config": chirp.config}
    job = node.resident("echo up; sleep 1000", files=files)
    state, reason = chirp.shown()
    assert (state, reason.partition(":")[0]) == ("RUNNING", "PROGRESS")
    job.process.kill()
    job.process.wait(60)
    lost = f"EXEC_LOST: the program that runs the job was killed; last report: {reason}"
    assert chirp.shown(status=IDLE) == ("PREEMPTED", lost)
    node.wait_empty()


def test_a_job_whose_starter_died_begins_again_once_its_vm_is_gone(
    node: AgentNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, destroy = threading.Event(), node.driver.destroy
    wait_until(lambda: not node.agent.runner.active.names(), what="jobs of other tests to be gone")

    def slowly(name: str) -> None:
        may_end.wait(300)
        destroy(name)

    monkeypatch.setattr(node.driver, "destroy", slowly)
    first = node.resident("echo up; sleep 1000")
    vms = node.vms()
    first.process.kill()
    first.process.wait(60)
    second = node.start("/bin/echo", "up")
    with pytest.raises(subprocess.TimeoutExpired):
        second.process.wait(5)
    assert (node.vms(), second.out) == (vms, "")
    may_end.set()
    assert second.process.wait(120) == 0
    assert second.out == "up\n"


#: What the ad of a job evicted by SIGTERM says.
TOLD_TO_LEAVE = "EVICTED: HTCondor told the job to leave its node (signal 15)"


@pytest.mark.parametrize(
    ("script", "status", "out", "how"),
    [
        # It may take as long as HTCondor allows.
        (
            "trap 'sleep 10; >state; echo stopped; exit 5' TERM; echo up; while :; do sleep 0.1; done",
            5,
            "up\nstopped\n",
            "it exited with status 5",
        ),
        ("echo up; exec sleep 1000", -signal.SIGTERM, "up\n", "it was killed by signal 15"),
    ],
    ids=["it does something about it", "it does nothing"],
)
def test_a_signal_reaches_the_job(
    node: AgentNode, chirp: ChirpService, script: str, status: int, out: str, how: str
) -> None:
    job = node.resident(script, files={".chirp.config": chirp.config})
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(180) == status
    assert job.out == out
    assert chirp.shown() == ("PREEMPTED", f"{TOLD_TO_LEAVE}, and {how}")
    assert (job.place / "state").exists() is ("stopped" in out), "what it does then comes back"
    node.wait_empty()


def test_a_job_that_does_not_leave_goes_with_whoever_ends_it(node: AgentNode) -> None:
    job = node.resident("trap '' TERM; echo up; while :; do sleep 0.1; done")
    job.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(10)
    node.end(job)


def test_a_job_that_is_suspended_stands_still(node: AgentNode) -> None:
    job = node.start("/bin/sh", "-c", "while :; do echo; sleep 0.1; done")
    wait_until(lambda: len(job.out) > 3, BOOT, "the job")
    job.process.send_signal(signal.SIGSTOP)
    (name,) = node.vms()
    wait_until(lambda: node.driver.state(name) is VmState.PAUSED, what="the VM to stand still")
    job.process.send_signal(signal.SIGCONT)
    wait_until(lambda: node.driver.state(name) is VmState.RUNNING, what="the VM to go on")
    before = len(job.out)
    wait_until(lambda: len(job.out) > before + 3, what="the job to go on")
    node.end(job)


def test_a_vm_that_is_killed_is_no_end_of_the_job(node: AgentNode, chirp: ChirpService) -> None:
    files = {".chirp.config": chirp.config}
    job = node.resident("echo up; sleep 1000", files=files)
    (name,) = node.vms()
    kill_all(name)
    assert job.process.wait(60) == -signal.SIGKILL
    state, reason = chirp.shown(status=IDLE)
    assert (state, reason.partition(":")[0]) == ("PREEMPTED", "GUEST_LOST")
    assert set(chirp.events) == {"ChirpVMState"}


@pytest.mark.soak
def test_large_and_many_files(node: AgentNode) -> None:
    def many(place: Path) -> None:
        (place / "many").mkdir()
        for number in range(2000):
            (place / "many" / str(number)).write_bytes(b"%d" % number)
        with (place / "large").open("wb") as file:
            for _ in range(64):
                file.write(os.urandom(MIB))

    script = "cd many; for n in 1 2 3; do echo changed >$n; done; cd ..; md5sum <large; cp large copy"
    job = node.run("/bin/sh", "-c", script, prepare=many)
    assert job.status == 0, job.err
    done = subprocess.run(["cmp", "large", "copy"], cwd=job.place, check=False)
    assert done.returncode == 0
    assert (job.place / "many/1").read_text() == "changed\n"
    assert (job.place / "many/1999").read_text() == "1999"
    shutil.rmtree(job.place)
