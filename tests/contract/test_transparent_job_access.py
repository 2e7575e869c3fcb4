"""Access to and from a transparent job's VM: Chirp, and users' shell sessions."""

from __future__ import annotations

import os
import pty
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import IO

import pytest

from tests.kit.agent_node import GID, UID, AgentNode, Job
from tests.kit.chirp_service import ChirpService
from tests.kit.cli import VMJOBS
from tests.kit.waiting import wait_until
from vmjobs.agent.condor_job.job_access import MAX_SESSIONS

AD = 'VMJobImage = "generic"\n'
pytest_plugins = ["tests.kit.agent_node"]


def chirping(node: AgentNode, chirp: ChirpService, script: str, ad: str = AD) -> Job:
    """Run a script to its end, with a Chirp service."""
    return node.run("/bin/sh", "-c", script, ad=ad, files={".chirp.config": chirp.config})


def test_a_job_that_asked_for_it_does_all_that_chirp_does(node: AgentNode, chirp: ChirpService) -> None:
    data = os.urandom(200_000)
    (chirp.folder / "there").write_bytes(data)
    script = """
        set -e
        condor_chirp set_job_attr Words '"two  words\\"\\\\ '"'"'and more"'
        condor_chirp get_job_attr Words
        condor_chirp ulog 'a note'
        condor_chirp fetch there here
        condor_chirp put -perm 644 here 'and back'
        condor_chirp fetch there - | cmp - here
        condor_chirp remove there
        ! condor_chirp fetch there again
        ! condor_chirp get_job_attr Nothing
        /usr/libexec/condor/condor_chirp set_job_attr_delayed ChirpDone 1
    """
    job = chirping(node, chirp, script, AD + "WantIOProxy = true\n")
    assert (job.status, job.out) == (0, '"two  words\\"\\\\ \'and more"\n'), job.err
    assert job.err.splitlines() == [
        "condor_chirp: open there: there is no such file or attribute",
        "condor_chirp: get_job_attr Nothing: there is no such file or attribute",
    ]
    assert (chirp.folder / "and back").read_bytes() == data
    assert not (chirp.folder / "there").exists()
    assert chirp.attributes["ChirpDone"] == "1"
    assert chirp.notes == ["a note"]
    assert (job.place / "here").read_bytes() == data
    assert (job.place / ".chirp.config").read_text().startswith("127.0.0.1 ")


def test_a_job_that_did_not_ask_has_its_own_attributes_alone(
    node: AgentNode, chirp: ChirpService
) -> None:
    """The image's author must not get at the user's files, nor have the job run elsewhere."""
    (chirp.folder / "secret").write_text("of the user")
    script = """
        condor_chirp set_job_attr_delayed ChirpMine 7
        condor_chirp get_job_attr_delayed ChirpMine
        condor_chirp set_job_attr VMJobImage undefined
        condor_chirp fetch secret stolen
        condor_chirp ulog noise
        read -r address port cookie <.chirp.config
        {
            echo "cookie $cookie"; echo open secret r 0; echo read 7 99
            echo set_job_attr_delayed ChirpVMOutcome '"own"'; echo get_job_attr_delayed RemoteWallClock
            echo set_job_attr_delayed 'Chirp\\VMOutcome' '"own"'; echo get_job_attr_delayed ChirpMine
        } >ask
        busybox nc "$address" "$port" <ask | tr '\\n' ,
    """
    job = chirping(node, chirp, script)
    assert job.out == "7\n0,-2,-2,-2,-2,-2,1,7", job.err
    assert job.err.count("not allowed; does the job have +WantIOProxy = true?") == 3
    assert "VMJobImage" not in chirp.attributes
    assert chirp.attributes["ChirpVMOutcome"] == '"own"'  # from ``exec-unchanged``, after the job's end
    assert not (job.place / "stolen").exists() or not (job.place / "stolen").read_bytes()
    assert chirp.notes == []


@pytest.mark.soak
def test_many_connections_at_once(node: AgentNode, chirp: ChirpService) -> None:
    script = """
        for n in 1 2 3 4 5 6; do condor_chirp set_job_attr_delayed "ChirpN$n" $n & done; wait
        read -r address port cookie <.chirp.config
        for n in 1 2 3 4 5 6 7 8 9 10 11 12; do
            { sleep 5; } | busybox nc "$address" "$port" &
        done
        sleep 2; condor_chirp set_job_attr_delayed ChirpN7 7; wait
        condor_chirp set_job_attr_delayed ChirpN8 8
    """
    job = chirping(node, chirp, script)
    assert job.status == 0, job.err
    assert {f"ChirpN{n}" for n in (1, 2, 3, 4, 5, 6, 8)} <= set(chirp.attributes)


@pytest.fixture(scope="module")
def resident(node: AgentNode) -> Iterator[Job]:
    """A job that keeps running, while other jobs come and go."""
    script = "echo mine >of-the-job; echo up; tail -f /dev/null"
    job = node.resident(script, environment={"GREETING": "two words"})
    node.lasting.update(node.vms())
    yield job
    node.lasting.clear()
    node.end(job)
    wait_until(lambda: not [*(node.folder / "handed").iterdir()], what="its files to be gone")


def surroundings(node: AgentNode, slot: int) -> dict[str, str]:
    own = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "SLOT": str(slot)}
    return {**own, "VMJOBS_SOCKET": str(node.socket)}


def entering(
    node: AgentNode, slot: int, command: str = "", uid: int = UID, terminal: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Open a session in the job of a slot. command: empty for a shell in a terminal."""
    asked = {"SSH_ORIGINAL_COMMAND": command} if command else {"TERM": "vt100"}
    return subprocess.Popen(
        [VMJOBS, "enter"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**surroundings(node, slot), **asked},
        user=uid,
        group=GID,
        extra_groups=[],
    )


def test_a_command_runs_in_the_job(node: AgentNode, resident: Job) -> None:
    command = """
        id -u; pwd; cat of-the-job; echo "$GREETING"; cat; echo 'to you' >&2
        cat /proc/[0-9]*/comm 2>/dev/null | grep -c tail; exit 7
    """
    visitor = entering(node, resident.process.pid, command)
    out, err = visitor.communicate(b"typed\n", timeout=60)
    lines = [str(UID), str(resident.place), "mine", "two words", "typed", "to you", "1"]
    assert out.decode().splitlines() == lines, err
    assert visitor.returncode == 7


def test_bytes_pass_untouched(node: AgentNode, resident: Job) -> None:
    data = os.urandom(3_000_000)
    out, err = entering(node, resident.process.pid, "cat").communicate(data, timeout=120)
    assert out == data, err


def test_a_shell_in_a_terminal(node: AgentNode, resident: Job) -> None:
    screen, terminal = pty.openpty()
    os.set_blocking(screen, False)
    visitor = entering(node, resident.process.pid, terminal=terminal)
    os.close(terminal)
    seen = bytearray()

    def sees(words: bytes) -> bool:
        try:
            seen.extend(os.read(screen, 65536))
        except BlockingIOError:
            return words in seen
        return words in seen

    wait_until(lambda: sees(b"$ "), what="a prompt")
    os.write(screen, b"tty; stty size; echo $TERM; cat of-the-job\r")
    wait_until(lambda: sees(b"vt100\r\nmine"), what="what the commands print")
    assert b"/dev/pts/" in seen
    os.write(screen, b"sh -c 'echo be\"\"gun; sleep 100'\r")
    wait_until(lambda: sees(b"begun\r\n"), what="the command to run")
    os.write(screen, b"\x03")
    os.write(screen, b"echo interrupt=$?\r")
    wait_until(lambda: sees(b"interrupt=130"), what="the shell to go on")
    os.write(screen, b"exit 3\r")
    assert visitor.wait(60) == 3
    os.close(screen)


def test_the_console_is_shown_without_the_vms_help(node: AgentNode, resident: Job) -> None:
    out, err = entering(node, resident.process.pid, "vmjobs-console").communicate(timeout=60)
    assert b"ready" in out, err
    tail = entering(node, resident.process.pid, f"vmjobs-console --offset {len(out) - 5}")
    assert tail.communicate(timeout=60)[0][:5] == out[-5:]
    stranger = entering(node, resident.process.pid, "vmjobs-console", uid=UID + 1)
    assert stranger.communicate(timeout=60)[0] == b""
    assert stranger.returncode == 125


def test_who_is_somebody_else_stays_outside(node: AgentNode, resident: Job) -> None:
    """Neither another user nor a process outside a job gets in."""
    for slot, uid in ((resident.process.pid, UID + 1), (os.getpid(), UID)):
        visitor = entering(node, slot, "id", uid=uid)
        out, err = visitor.communicate(timeout=60)
        assert out == b""
        assert b"this job has no running VM on this node" in err
        assert visitor.returncode == 125


def test_no_token_is_in_sight_in_there(node: AgentNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the SSH relay's token, a job could answer in place of the SSH server; with that
    of the guest endpoint, it could report the job's end in place of the guest.
    """
    made: dict[str, list[str]] = {"token_hex": [], "token_urlsafe": []}

    def noting(name: str) -> Callable[[int | None], str]:
        real: Callable[[int | None], str] = getattr(secrets, name)

        def note(size: int | None = None) -> str:
            made[name].append(real(size))
            return made[name][-1]

        return note

    for name in made:
        monkeypatch.setattr(secrets, name, noting(name))
    script = """
        until grep -qs '[s]sh_session.sh' /proc/[0-9]*/cmdline; do sleep 0.1; done
        sleep 3; for n in 1 2 3 4; do
            for file in /proc/[0-9]*/cmdline /proc/[0-9]*/environ; do
                tr '\\0' ' ' <$file; echo
            done 2>/dev/null
            sleep 0.5
        done
        { cat /run/vmjobs/job/job.env; head -c 4096 /dev/ubdb; } 2>/dev/null
        find / -xdev -name ssh_relay 2>/dev/null | xargs -r cat
    """
    job = node.run("/bin/sh", "-c", script)
    assert job.status == 0, job.err
    assert "ssh_session.sh keep" in job.out
    assert all(made.values()), made
    assert [token for tokens in made.values() for token in tokens if token in job.out] == []


def test_no_more_than_some_are_inside(node: AgentNode) -> None:
    job = node.resident("echo up; sleep 1000")
    slot = job.process.pid
    visitors = [entering(node, slot, "echo in; sleep 1000") for _ in range(MAX_SESSIONS)]
    for visitor in visitors:
        assert visitor.stdout is not None
        assert visitor.stdout.readline() == b"in\n"
    late = entering(node, slot, "id")
    assert b"sessions already" in late.communicate(timeout=60)[1]
    visitors.pop().kill()
    deadline = time.monotonic() + 120
    while (again := entering(node, slot, "exit 9")).wait(60) != 9:
        assert time.monotonic() < deadline, again.communicate()
    for visitor in visitors:
        visitor.kill()
        visitor.wait(60)
    node.end(job)


def test_who_leaves_while_nobody_reads_leaves_room(node: AgentNode) -> None:
    job = node.resident("echo up; sleep 1000")
    slot = job.process.pid
    for _ in range(MAX_SESSIONS + 2):
        visitor = entering(node, slot, "echo in; sleep 1000")
        assert visitor.stdin is not None
        assert visitor.stdout is not None
        assert visitor.stdout.readline() == b"in\n"
        threading.Thread(target=_pour, args=(visitor.stdin.fileno(),), daemon=True).start()
        wait_until(partial(is_full, visitor.stdin), what="what is on its way stands")
        visitor.kill()
        visitor.wait(60)
    node.end(job)


def is_full(pipe: IO[bytes]) -> bool:
    """Whether nothing can be written for 0.3 seconds."""
    return not select.select([], [pipe], [], 0.3)[1]


def _pour(handle: int) -> None:
    with suppress(OSError):
        while True:
            os.write(handle, bytes(65536))


def test_a_job_ends_while_it_does_not_read_its_answers(node: AgentNode, chirp: ChirpService) -> None:
    script = """
        read -r address port cookie <.chirp.config; echo up
        bash -c 'exec 3<>"/dev/tcp/$1/$2"; yes "cookie x" >&3' bash "$address" "$port"
    """
    job = node.resident(script, files={".chirp.config": chirp.config})
    seen = [0]

    def stands() -> bool:
        seen.append(chirp.served)
        return chirp.served > 0 and len(seen) > 50 and len(set(seen[-50:])) == 1

    wait_until(stands, 60, "all that can be on its way is")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(60) == -signal.SIGTERM
    node.wait_empty()


def test_the_job_ends_under_a_visitor(node: AgentNode) -> None:
    job = node.resident("echo up; while [ ! -e over ]; do sleep 0.2; done; exit 4")
    command = "trap '' TERM HUP; echo in; touch over; while :; do sleep 1; done"
    visitor = entering(node, job.process.pid, command)
    assert visitor.stdout is not None
    assert visitor.stdout.readline() == b"in\n"
    assert job.process.wait(60) == 4
    visitor.communicate(timeout=60)
    assert visitor.returncode != 0
    assert (job.place / "over").exists()
