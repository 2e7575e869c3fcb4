"""The guest program in booted guests, on UML; test_agent_checkpoint.py boots them on QEMU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from images import recipe
from images.build.builder import build
from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.image_builds import STORE, WORK, Bench, Guest, exit_json, need, spoil_job_disk
from vmjobs.model import JobState, NetworkMode, ReasonCode

pytest_plugins = ["tests.kit.image_builds"]


@pytest.fixture(scope="module")
def store() -> ImageStore:
    return ImageStore(STORE)


@pytest.fixture(scope="module")
def generic(store: ImageStore) -> str:
    return build("generic", store, WORK).digest


@pytest.fixture(scope="module")
def hep(store: ImageStore) -> str:
    return build("hep", store, WORK).digest


def offline(vms: Bench, image: str, script: str, **fields: object) -> Guest:
    """Run a script without a network."""
    return vms.start(image, script, network=NetworkMode.NONE, **fields).end()  # type: ignore[arg-type]


def test_the_guest_program_has_no_faults_that_shellcheck_knows() -> None:
    need("shellcheck")
    files = [*(ROOT / "images").glob("*/*.sh"), *(ROOT / "images").glob("oci/guest/*.sh")]
    done = subprocess.run(["shellcheck", "-x", *files], capture_output=True, text=True, check=False)
    assert done.stdout == ""


# ------------------------------------------------------------------ without a network


def test_a_script_gets_what_it_was_promised(generic: str, vms: Bench) -> None:
    script = r"""#!/bin/bash
printf '<%s>' "$@"; echo
echo "$GREETING|$VMJOBS_JOB_ID $VMJOBS_ARRAY_INDEX $VMJOBS_ARRAY_COUNT|$PWD"
cat data/in.txt; echo more >> data/in.txt
env | grep -c TOKEN
trap | grep -c "''"
ls -A | wc -l
for place in /dev/fd /dev/shm /dev/pts /tmp /proc/self/fd/0; do [ -e $place ] || echo "no $place"; done
stat -c %a /job/tmp /dev/shm /run/vmjobs
hostname
echo complaint >/dev/stderr
mkdir -p 'sub dir'; echo a > 'sub dir/a b.txt'; echo x > out.txt; echo no > left.log
ln -s /etc/passwd link.txt; ln -s /etc 'sub dir/etc'; mkdir real.txt
exit 7
"""
    guest = offline(
        vms,
        generic,
        script,
        inputs={"data/in.txt": b"input\n"},
        arguments=("one", "two three", "it's; $HOME"),
        environment={"GREETING": "gruess' Gott\n$(x)"},
        outputs=("*.txt", "sub dir/*.txt", "sub*/a*", "*/etc/passwd", "data/in.txt", "none-*"),
    )
    assert guest.exit == exit_json(guest) == {"code": 7}, guest.text
    assert guest.out.getvalue().decode() == (
        "<one><two three><it's; $HOME>\ngruess' Gott\n$(x)|job-1 3 5|/job/work\n"
        "input\n0\n0\n1\n1777\n1777\n700\nvmjob-3\n"
    )
    assert guest.err.getvalue() == b"complaint\n"
    assert guest.outputs == {
        "out.txt": b"x\n",
        "sub dir/a b.txt": b"a\n",
        "data/in.txt": b"input\nmore\n",
    }
    assert {entry.path: entry.why for entry in guest.report.rejected} == {
        "link.txt": "not a regular file but a symbolic link",
        "sub dir/etc/passwd": "it lies outside of the job's directory",
    }
    assert all(member.isreg() for member in guest.members)
    assert guest.members[0].name == "exit.json"
    assert len(guest.members) == 7
    assert guest.said("ready") == ""
    assert guest.said("collecting") == "code=7"
    assert guest.said("exit") == "code=7"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/no/such/interpreter", {"code": 127}),
        ("sh -c 'kill -9 -1'; echo still here; exit 5", {"signal": 9}),
        ("exec >&- 2>&-; rm -f /job/stdout /job/stderr; exit 137", {"code": 137}),
        ("trap '' HUP; setsid sh -c 'while :; do :; done' & kill -SEGV $$", {"signal": 11}),
    ],
)
def test_the_end_of_a_script_is_told_exactly(
    generic: str, vms: Bench, script: str, expected: dict[str, int]
) -> None:
    text = script if script.startswith("#!") else f"#!/bin/sh\n{script}"
    guest = offline(vms, generic, f"{text}\n")
    assert guest.exit == exit_json(guest) == expected, guest.text
    ((kind, number),) = expected.items()
    assert guest.said("exit") == f"{kind}={number}"


def test_a_full_disk_is_told_and_the_exit_status_still_arrives(generic: str, vms: Bench) -> None:
    script = "dd if=/dev/zero of=big bs=1M || exit 9"
    guest = offline(vms, generic, script, disk=16, outputs=("x",))
    assert guest.exit == exit_json(guest) == {"code": 9}, guest.text
    assert guest.said("collecting") == "code=9 disk=full"
    assert guest.report.reason.code is ReasonCode.OUTPUT_TOO_LARGE


def test_a_guest_that_cannot_set_itself_up_says_why_and_reports_no_exit(
    generic: str, vms: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_job_disk(monkeypatch)
    guest = offline(vms, generic, "true")
    assert "vmjobs: error: cannot read the job disk" in guest.text
    assert guest.disk == {}
    assert ":exit" not in guest.text
    assert guest.report.reason.code is ReasonCode.BOOT_FAILED
    assert "cannot read the job disk" in guest.report.reason.message


PHYSICS = """
import pythia8mc
pythia = pythia8mc.Pythia("", False)
for line in ("Beams:eCM = 13000.", "SoftQCD:inelastic = on", "Print:quiet = on",
             "Random:setSeed = on", "Random:seed = 1"):
    pythia.readString(line)
pythia.init()
charged = 0
for _ in range(100):
    pythia.next()
    charged += sum(p.isFinal() and p.isCharged() for p in pythia.event)
print(charged / 100)
"""


def test_physics_in_the_guest_is_the_physics_of_the_host(hep: str, vms: Bench, tmp_path: Path) -> None:
    guest = vms.start(hep, f"#!/usr/bin/env python3\nimport numpy\n{PHYSICS}", network=NetworkMode.NONE)
    python = recipe.load("hep").python
    assert python is not None
    (wheel,) = python.wheels
    place = tmp_path / "native"
    fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    fetch += ["--no-deps", "--only-binary=:all:", "--target", str(place)]
    subprocess.run([*fetch, f"{wheel.name}=={wheel.version}"], check=True)
    ways = {"PYTHONPATH": str(place), "PYTHIA8DATA": str(place / "share" / "Pythia8" / "xmldoc")}
    native = subprocess.run(
        [sys.executable, "-c", PHYSICS], env={**os.environ, **ways}, capture_output=True, check=True
    )
    guest.end()
    assert guest.exit == {"code": 0}, guest.err.getvalue().decode()
    # Events with one seed agree to the last particle; otherwise their numbers soon differ.
    assert guest.out.getvalue() == native.stdout
    assert 70 < float(native.stdout) < 100


# ------------------------------------------------------------------ with an endpoint


def test_files_travel_by_disk_and_words_by_the_endpoint(generic: str, vms: Bench) -> None:
    binary = os.urandom(3_000_000)
    script = "cat in.bin */*; echo err >&2; mv in.bin 'a b+\xfc.bin'; mkdir d; cd d; touch `seq 3000`"
    inputs = {"in.bin": binary, "deep/empty": b"", f"deep/{'long' * 50}": b"more"}
    guest = vms.start(
        generic, f"{script}; exit 3", inputs=inputs, outputs=("*.bin", "d/*", "d/1*")
    ).end()
    posted = [line for line in vms.calls.seen if line in {"/v1/ready", "/v1/collecting", "/v1/exit"}]
    assert posted == ["/v1/ready", "/v1/collecting", "/v1/exit"], guest.text
    assert guest.exit == {"code": 3}
    assert guest.out.getvalue() == binary + b"more"
    assert guest.err.getvalue() == b"err\n"
    assert guest.outputs == {"a b+\xfc.bin": binary, **{f"d/{n}": b"" for n in range(1, 3001)}}
    assert {member.name for member in guest.members} == {
        "exit.json",
        *(f"outputs/{n}" for n in guest.outputs),
    }
    assert guest.said("exit") == "code=3"


def test_output_arrives_while_the_script_runs_and_signals_reach_it(generic: str, vms: Bench) -> None:
    script = "#!/bin/bash\ntrap 'trap - TERM; echo caught' TERM\necho up\nwhile :; do sleep 1; done\n"
    guest = vms.start(generic, script)
    guest.out.wait_for(b"up\n")
    guest.run.guest_session.send_signal(15)
    guest.out.wait_for(b"caught\n")
    guest.run.vm.driver.stop(guest.machine)  # the power button
    guest.end()
    assert guest.exit == {"signal": 15}
    assert guest.out.getvalue() == b"up\ncaught\n"


def test_a_script_that_kills_all_helpers_loses_no_output(generic: str, vms: Bench) -> None:
    script = "#!/bin/bash\necho one\nkill -9 -1\nseq 1 20000\nsleep 600\n"
    guest = vms.start(generic, script)
    guest.out.wait_for(b"\n20000\n")
    # The control loop runs again, too. The killed one's request still waits at the server and also
    # takes the signal, but never confirms its delivery.
    vms.calls.wait_for("/v1/control?wait=25&done=0", 2)
    guest.run.guest_session.send_signal(2)
    guest.end()
    assert guest.exit == {"signal": 2}, guest.text
    numbers = "".join(f"{n}\n" for n in range(1, 20001))
    assert guest.out.getvalue().decode() == f"one\n{numbers}"


def test_what_a_helper_has_just_read_is_not_lost_with_it(generic: str, vms: Bench) -> None:
    # The helper waits for output. The script takes all the processor: it kills the helper before that
    # could write what it has read.
    script = """#!/bin/bash
        renice -n -20 $$ >/dev/null
        for number in 1 2 3; do
            until grep -qs '^[0-9]* (talk) S' /proc/[0-9]*/stat; do sleep 0.1; done
            sleep 1
            echo $number
            kill -9 -1
        done
        """.replace("\n        ", "\n")
    guest = vms.start(generic, script).end()
    assert guest.exit == {"code": 0}, guest.text
    assert guest.out.getvalue() == b"1\n2\n3\n"


@pytest.mark.parametrize("network", [NetworkMode.NONE, NetworkMode.REPOSITORY])
def test_the_last_words_of_a_script_that_kills_all_helpers_arrive(
    generic: str, vms: Bench, network: NetworkMode
) -> None:
    script = "#!/bin/bash\necho one >&2\nseq 1 5000\nkill -9 -1\nexit 5\n"
    guest = vms.start(generic, script, network=network).end()
    assert guest.exit == {"code": 5}, guest.text
    assert guest.out.getvalue().decode() == "".join(f"{n}\n" for n in range(1, 5001))
    assert guest.err.getvalue() == b"one\n"


def test_background_processes_that_keep_the_pipe_do_not_hold_up_the_end(
    generic: str, vms: Bench
) -> None:
    script = "#!/bin/bash\nexec > >(tee copy) 2>&1\necho last words\nsleep 1000 & exit 2\n"
    guest = vms.start(generic, script).end()  # it waits for less than 1000 s
    assert guest.exit == {"code": 2}
    assert guest.out.getvalue() == b"last words\n"


def test_a_guest_short_of_memory_keeps_its_network(generic: str, vms: Bench) -> None:
    # Each line is a request, for which the guest needs memory that the writer has just filled.
    write = (
        "dd if=/dev/zero of=big bs=1M count=600 & while kill -0 $!; do echo; done; wait $! && rm big"
    )
    script = f"set -e; for number in 1 2; do {write}; done"
    guest = vms.start(generic, script, memory=192, disk=1024).end()
    assert guest.exit == {"code": 0}, guest.text
    assert guest.out.getvalue().strip(b"\n") == b""


def test_an_endpoint_that_fails_for_a_while_is_asked_again(generic: str, vms: Bench) -> None:
    failures = {"/v1/ready": 1, "/v1/log/out?offset=0": 1, "/v1/exit": 1}

    def answer(path: str) -> int | None:
        if not failures.get(path):
            return None
        failures[path] -= 1
        return 503

    vms.calls.answer = answer
    guest = vms.start(generic, "cat name", inputs={"name": b"hello\n"}).end()
    assert guest.report.state is JobState.COMPLETED, guest.text
    assert guest.out.getvalue() == b"hello\n"
    assert not any(failures.values())
    assert vms.calls.seen.count("/v1/ready") == 2


def test_what_is_not_delivered_is_no_success_and_it_is_told_whose_fault(
    generic: str, vms: Bench, tmp_path: Path
) -> None:
    """Guests try five times, which takes a while, so both run at once."""
    path = "/v1/log/out?offset=0"

    def answer(line: str) -> int | None:
        if line == "/v1/log/err?offset=0":
            not_kept.run.guest_session.logs["err"] = tmp_path / "none" / "err"
        return 503 if line == path else None

    vms.calls.answer = answer
    lost = vms.start(generic, "echo some")
    not_kept = vms.start(generic, "echo some >&2")
    assert lost.end().exit == {"code": 0}
    assert vms.calls.seen.count(path) == 5
    assert (lost.report.state, lost.report.reason.code) == (JobState.FAILED, ReasonCode.GUEST_LOST)
    assert "could not send all" in lost.report.reason.message
    assert not_kept.end().report.reason.code is ReasonCode.NODE_FAILED
    for guest in (lost, not_kept):
        assert guest.said("exit") == "code=0 undelivered=yes"


def test_a_script_that_fills_run_loses_nothing_unsaid(generic: str, vms: Bench) -> None:
    """Its printed text arrives; its output files cannot be collected."""
    script = "dd if=/dev/zero of=/run/x bs=64k 2>/dev/null; sleep 1; echo early; sleep 3; echo late"
    guest = vms.start(generic, script).end()
    assert guest.out.getvalue() == b"early\nlate\n"
    assert (guest.report.reason.code, guest.exit) == (ReasonCode.GUEST_LOST, {"code": 0}), guest.text


@pytest.mark.soak  # tests/contract/test_cloud_kit.py tests another guest
def test_what_is_not_sent_in_time_is_no_success(generic: str, vms: Bench) -> None:
    over = threading.Event()

    def answer(_: str) -> None:
        guest.run.guest_session.on_log = lambda: over.wait(600)  # type: ignore[assignment, return-value]

    vms.calls.answer = answer
    guest = vms.start(generic, "echo some")
    try:
        guest.console.wait_for(b"the logs are incomplete", 500)
    finally:
        over.set()
    assert guest.end().report.reason.code is ReasonCode.GUEST_LOST
    assert guest.said("exit") == "code=0 undelivered=yes"


def test_what_has_no_room_on_the_disk_is_no_success(generic: str, vms: Bench) -> None:
    """Even if the script does not notice it, and frees space afterwards."""
    script = "dd if=/dev/zero of=fill bs=64k 2>/dev/null; seq 9999; sleep 2; rm fill; echo late"
    guest = offline(vms, generic, script, disk=16)
    assert guest.report.reason.code is ReasonCode.OUTPUT_TOO_LARGE, guest.text
    assert guest.said("collecting") == "code=0 disk=full"
    whole = "".join(f"{n}\n" for n in range(1, 10000)).encode()
    assert whole.startswith(guest.out.getvalue())
    assert guest.text.count("lost bytes") == 1


#: Files larger than any disk, and than the job's. A name that no host takes; non-regular files.
LARGE = "truncate -s 2T a; truncate -s 400M b"
ODD = r"""echo y >'d
e'; mkdir f; ln -s c g; ln -s none 'h i'; mkfifo j; mknod k c 1 3
perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0) && bind(S, sockaddr_un("l")) || die'"""
KINDS = {"g": "symbolic link", "h i": "symbolic link", "j": "FIFO", "k": "device", "l": "socket"}


@pytest.mark.parametrize(
    ("network", "script", "lacking", "code"),
    [
        (NetworkMode.NONE, f"{LARGE}; {ODD}", {"a", "b"}, ReasonCode.OUTPUT_TOO_LARGE),
        (NetworkMode.REPOSITORY, ODD, set(), ReasonCode.OUTPUT_MISSING),
    ],
)
def test_outputs_that_cannot_be_taken_are_named_and_the_rest_is(
    generic: str, vms: Bench, network: NetworkMode, script: str, lacking: set[str], code: ReasonCode
) -> None:
    guest = vms.start(generic, f"{script}; echo x >c", network=network, outputs=("*",), disk=100).end()
    assert guest.outputs == {"c": b"x\n"}, guest.text
    why = {entry.path: entry.why for entry in guest.report.rejected}
    assert set(why) == lacking | {"d\ne", *KINDS}
    assert all(why[name] == f"not a regular file but a {kind}" for name, kind in KINDS.items())
    found = (guest.report.state, guest.report.reason.code, guest.exit)
    assert found == (JobState.FAILED, code, {"code": 0})


def test_an_output_that_cannot_be_read_is_no_success(generic: str, vms: Bench) -> None:
    script = "echo x >a; echo >b; busybox mount --bind /sys/bus/platform/drivers_probe b; echo y >c"
    guest = offline(vms, generic, script, outputs=("*",))
    assert "cannot collect the outputs" in guest.text
    assert (guest.report.reason.code, guest.exit) == (ReasonCode.GUEST_LOST, {"code": 0})
    assert guest.outputs == {"a": b"x\n", "c": b"y\n"}


def test_a_guest_that_its_host_refuses_gives_up(generic: str, vms: Bench) -> None:
    vms.calls.answer = lambda path: 409 if path == "/v1/ready" else None
    guest = vms.start(generic, "true").end()
    assert "vmjobs: error: cannot report to http://10.0.2.100 (status 409)" in guest.text
    assert set(vms.calls.seen) == {"/v1/ready"}
    assert guest.report.reason.code is ReasonCode.BOOT_FAILED
