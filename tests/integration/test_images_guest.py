"""The guest program, in guests that boot: UML first, QEMU where the kernel and initrd matter."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from images_kit import ROOT, STORE, WORK, Ended, Endpoint, Guest, serving

from images.build import build
from images.store import ImageStore
from vmjobs.hypervisor.base import BootImage


@pytest.fixture(scope="module")
def generic() -> BootImage:
    store = ImageStore(STORE)
    return store.prepare(build("generic", store, WORK).digest)


@pytest.fixture(scope="module")
def hep() -> BootImage:
    store = ImageStore(STORE)
    return store.prepare(build("hep", store, WORK).digest)


def run(image: BootImage, folder: Path, script: str, **more: object) -> Ended:
    """Run a script without a network."""
    return Guest(image, folder, script=script.encode(), **more).uml()  # type: ignore[arg-type]


def test_the_guest_program_has_no_faults_that_shellcheck_knows() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    files = [*(ROOT / "images" / "guest").glob("*.sh"), *(ROOT / "images" / "build").glob("*.sh")]
    done = subprocess.run(["shellcheck", "-x", *files], capture_output=True, text=True, check=False)
    assert done.stdout == ""


# ------------------------------------------------------------------ without a network


def test_a_script_gets_what_it_was_promised(generic: BootImage, tmp_path: Path) -> None:
    script = r"""#!/bin/bash
printf '<%s>' "$@"; echo
echo "$GREETING|$VMJOBS_JOB_ID $VMJOBS_ARRAY_INDEX $VMJOBS_ARRAY_COUNT|$PWD"
cat data/in.txt; echo more >> data/in.txt
env | grep -c TOKEN
trap | grep -c "''"
ls -A | wc -l
echo complaint >&2
mkdir -p 'sub dir'; echo a > 'sub dir/a b.txt'; echo x > out.txt; echo no > left.log
ln -s /etc/passwd link.txt; ln -s /etc 'sub dir/etc'; mkdir real.txt
exit 7
"""
    ended = run(
        generic,
        tmp_path,
        script,
        inputs={"data/in.txt": b"input\n"},
        arguments=("one", "two three", "it's; $HOME"),
        environment={"GREETING": "gruess' Gott\n$(x)"},
        outputs=("*.txt", "sub dir/*.txt", "sub*/a*", "*/etc/passwd", "data/in.txt", "none-*"),
    )
    assert ended.exit == {"code": 7}, ended.console
    assert ended.disk["stdout"].decode() == (
        "<one><two three><it's; $HOME>\ngruess' Gott\n$(x)|job-1 3 5|/job/work\ninput\n0\n0\n1\n"
    )
    assert ended.disk["stderr"] == b"complaint\n"
    outputs = {n: d for n, d in ended.disk.items() if n.startswith("outputs/")}
    assert outputs == {
        "outputs/out.txt": b"x\n",
        "outputs/sub dir/a b.txt": b"a\n",
        "outputs/data/in.txt": b"input\nmore\n",
    }
    assert all(member.isreg() for member in ended.members)
    assert ended.members[0].name == "exit.json"
    assert ended.said("ready") == ""
    assert ended.said("collecting") == "code=7"
    assert ended.said("exit") == "code=7"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", {"code": 0}),
        ("exit 137", {"code": 137}),
        ("kill -9 $$", {"signal": 9}),
        ("kill -15 $$", {"signal": 15}),
        ("kill -INT $$", {"signal": 2}),
        ("kill -SEGV $$", {"signal": 11}),
        ("#!/no/such/interpreter", {"code": 127}),
        ("sh -c 'kill -9 -1'; echo still here; exit 5", {"signal": 9}),
        ("kill -9 -1; echo still here; exit 5", {"code": 5}),
        ("exec >&- 2>&-; rm -f /job/stdout /job/stderr; exit 4", {"code": 4}),
        ("sleep 1000 & sleep 1000 & exit 6", {"code": 6}),
        ("trap '' HUP; setsid sh -c 'while :; do :; done' & exit 8", {"code": 8}),
    ],
)
def test_the_end_of_a_script_is_told_exactly(
    generic: BootImage, tmp_path: Path, script: str, expected: dict[str, int]
) -> None:
    text = script if script.startswith("#!") else f"#!/bin/sh\n{script}"
    ended = run(generic, tmp_path, f"{text}\n")
    assert ended.exit == expected, ended.console
    ((kind, number),) = expected.items()
    assert ended.said("exit") == f"{kind}={number}"


def test_a_full_disk_is_told_and_the_exit_status_still_arrives(
    generic: BootImage, tmp_path: Path
) -> None:
    ended = run(generic, tmp_path, "dd if=/dev/zero of=big bs=1M || exit 9", disk=16, outputs=("x",))
    assert ended.exit == {"code": 9}, ended.console
    assert ended.said("collecting") == "code=9 disk=full"


def test_a_guest_that_cannot_set_itself_up_says_why_and_reports_no_exit(
    generic: BootImage, tmp_path: Path
) -> None:
    ended = Guest(generic, tmp_path, job_disk=b"not a tar archive" * 100).uml()
    assert "vmjobs: error: cannot read the job disk" in ended.console
    assert ended.disk == {}
    assert ":exit" not in ended.console


def test_qemu_boots_the_same_image(generic: BootImage, tmp_path: Path) -> None:
    guest = Guest(generic, tmp_path, script=b"uname -r; echo x > o; exit 3", outputs=("o",))
    ended = guest.qemu()
    assert ended.exit == {"code": 3}, ended.console
    assert ended.disk["outputs/o"] == b"x\n"
    assert b"cloud" in ended.disk["stdout"]


def test_physics_in_the_guest_is_the_physics_of_the_host(hep: BootImage, tmp_path: Path) -> None:
    script = """#!/usr/bin/env python3
import numpy, pythia8mc
pythia = pythia8mc.Pythia("", False)
for line in ("Beams:eCM = 13000.", "SoftQCD:inelastic = on", "Print:quiet = on",
             "Random:setSeed = on", "Random:seed = 1"):
    pythia.readString(line)
pythia.init()
charged = []
for _ in range(100):
    pythia.next()
    charged.append(sum(p.isFinal() and p.isCharged() for p in pythia.event))
print(round(float(numpy.mean(charged)), 2))
"""
    ended = run(hep, tmp_path, script)
    assert ended.exit == {"code": 0}, ended.disk["stderr"].decode()
    # Seed 1, 100 inelastic events at 13 TeV: what Pythia 8.317 gives wherever it runs.
    assert float(ended.disk["stdout"]) == pytest.approx(84.86, abs=0.5)


# ------------------------------------------------------------------ with an endpoint


def test_a_job_goes_over_the_endpoint(generic: BootImage, tmp_path: Path) -> None:
    binary = os.urandom(300_000)
    endpoint = Endpoint(
        b"cat in.bin; echo err >&2; cp in.bin 'a b+\xc3\xbc.bin'; mkdir d; : > d/empty; exit 3\n",
        {"in.bin": binary},
        answer=lambda _method, path: 422 if path.endswith("/in.bin") else None,
    )
    with serving(endpoint) as url:
        ended = Guest(generic, tmp_path, endpoint=url, outputs=("*.bin", "d/*")).uml()
    assert endpoint.words == {"ready": "", "collecting": "code=3", "exit": "code=3"}, ended.console
    assert bytes(endpoint.logs["out"]) == binary
    assert bytes(endpoint.logs["err"]) == b"err\n"
    assert endpoint.outputs == {"a b+\xfc.bin": binary, "d/empty": b""}
    assert not endpoint.bad_token
    assert ended.said("exit") == "code=3"


def test_qemu_guests_reach_the_endpoint(generic: BootImage, tmp_path: Path) -> None:
    endpoint = Endpoint(b"echo hello; echo x > o")
    with serving(endpoint) as url:
        ended = Guest(generic, tmp_path, endpoint=url, outputs=("o",)).qemu()
    assert endpoint.words["exit"] == "code=0", ended.console
    assert bytes(endpoint.logs["out"]) == b"hello\n"
    assert endpoint.outputs == {"o": b"x\n"}


def test_output_arrives_while_the_script_runs_and_signals_reach_it(
    generic: BootImage, tmp_path: Path
) -> None:
    endpoint = Endpoint(b"#!/bin/bash\ntrap 'echo caught; exit 21' TERM\necho up\nsleep 600 &\nwait\n")

    def during() -> None:
        endpoint.wait_for_log(b"up\n")
        endpoint.send_signal(15)

    with serving(endpoint) as url:
        Guest(generic, tmp_path, endpoint=url).uml(during=during)
    assert endpoint.words["exit"] == "code=21"
    assert bytes(endpoint.logs["out"]) == b"up\ncaught\n"


def test_a_script_that_kills_all_helpers_loses_no_output(generic: BootImage, tmp_path: Path) -> None:
    script = b"#!/bin/bash\necho one\nkill -9 -1\nseq 1 20000\nsleep 600\n"
    endpoint = Endpoint(script)

    def during() -> None:
        endpoint.wait_for_log(b"\n20000\n")
        # The control loop is back as well. The request of the one that was killed still waits at
        # the server and would take the order with it: the third comes when that one is over.
        endpoint.wait_for_request("GET /v1/control?wait=25", 3)
        endpoint.send_signal(2)

    with serving(endpoint) as url:
        ended = Guest(generic, tmp_path, endpoint=url).uml(during=during)
    assert endpoint.words["exit"] == "signal=2", ended.console
    numbers = "".join(f"{n}\n" for n in range(1, 20001))
    assert bytes(endpoint.logs["out"]).decode() == f"one\n{numbers}"


def test_background_processes_that_keep_the_pipe_do_not_hold_up_the_end(
    generic: BootImage, tmp_path: Path
) -> None:
    endpoint = Endpoint(b"#!/bin/bash\nexec > >(tee copy) 2>&1\necho last words\nsleep 1000 & exit 2\n")
    began = time.monotonic()
    with serving(endpoint) as url:
        Guest(generic, tmp_path, endpoint=url).uml()
    assert endpoint.words["exit"] == "code=2"
    assert bytes(endpoint.logs["out"]) == b"last words\n"
    assert time.monotonic() - began < 60


def test_an_endpoint_that_fails_for_a_while_is_asked_again(generic: BootImage, tmp_path: Path) -> None:
    failures = {"/v1/job.tar": 2, "/v1/ready": 1, "/v1/log/out?offset=0": 2, "/v1/exit": 1}

    def answer(_method: str, path: str) -> int | None:
        if failures.get(path):
            failures[path] -= 1
            return 503
        return None

    endpoint = Endpoint(b"echo hello", answer=answer)
    with serving(endpoint) as url:
        ended = Guest(generic, tmp_path, endpoint=url).uml()
    assert endpoint.words == {"ready": "", "collecting": "code=0", "exit": "code=0"}, ended.console
    assert bytes(endpoint.logs["out"]) == b"hello\n"
    assert not any(failures.values())


def test_a_guest_without_its_job_gives_up(generic: BootImage, tmp_path: Path) -> None:
    endpoint = Endpoint(b"", answer=lambda _method, path: 409 if path == "/v1/job.tar" else None)
    with serving(endpoint) as url:
        ended = Guest(generic, tmp_path, endpoint=url).uml()
    assert "vmjobs: error: cannot fetch the job" in ended.console
    assert "(status 409)" in ended.console
    assert endpoint.words == {}
