"""The sandbox, without image inspection: what an attack that passed it could reach."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.inspect import sandbox
from images.inspect.sandbox import OUTPUT, SOURCE, SandboxLimits
from tests.kit.disk_formats import Lab, disk, qemu_img
from tests.kit.hypervisors import mentioning
from tests.kit.waiting import wait_until
from vmjobs.errors import ImageRejected, Unavailable
from vmjobs.seccomp import CLONE_THREAD, build_filter

MIB = 1024 * 1024
NOBODY = 65534
LIMITS = SandboxLimits(seconds=60, cpu_seconds=30, file_size=64 * MIB, written=64 * MIB)
SECRET = b"a secret of the host" * 100


def python(program: str, source: Path | None = None, output: Path | None = None) -> Any:
    """Run some Python in the sandbox and return what it prints, which is JSON."""
    on_output = bytearray()
    argv = ("python3", "-c", f"import os, json, socket, ctypes\n{program}")
    if source is None:
        sandbox.run(argv, output=output, limits=LIMITS, on_output=on_output.extend)
    else:
        with source.open("rb") as file:
            sandbox.run(argv, source=file, output=output, limits=LIMITS, on_output=on_output.extend)
    return json.loads(on_output)


def attempt(*lines: str) -> object:
    """Run statements in the sandbox; return the error's name, or ``done``."""
    body = "".join(f"    {line}\n" for line in lines)
    return python(f"try:\n{body}    r = 'done'\nexcept OSError as e:\n    r = type(e).__name__\n"
                  "print(json.dumps(r))")  # fmt: skip


def format_option(format_: str) -> list[str]:
    """The option of qemu-img; without a format it probes the image."""
    return ["-f", format_] if format_ else []


def convert(image: Path, output: Path, format_: str) -> None:
    """Convert without checks: with the format only, following all of the image's references."""
    argv = ("qemu-img", "convert", *format_option(format_), "-O", "raw", SOURCE, f"{OUTPUT}/disk")
    with image.open("rb") as file:
        sandbox.run(argv, source=file, output=output, limits=LIMITS)


def stolen(image: Path, tmp_path: Path, format_: str) -> bytes:
    """Return what the same conversion reads without a sandbox."""
    qemu_img("convert", *format_option(format_), "-O", "raw", image, tmp_path / "stolen")
    return (tmp_path / "stolen").read_bytes()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET.ljust(65536, b"\0"))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "output"
    path.mkdir()
    return path


def check_nothing_got_out(image: Path, output: Path, format_: str) -> None:
    with pytest.raises(ImageRejected) as caught:
        convert(image, output, format_)
    assert caught.value.faults[0].code == "conversion_failed"
    assert all(SECRET[:20] not in path.read_bytes() for path in output.iterdir())


def backing_file(image: Path, secret: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", "-b", secret, "-F", "raw", image)


def external_data_file(image: Path, secret: Path) -> None:
    """CVE-2024-32498."""
    data = image.with_name("data")
    options = f"data_file={data},data_file_raw=on,preallocation=metadata"
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, image, "64k")
    data.unlink()
    data.symlink_to(secret)


def extent_of_a_vmdk(image: Path, secret: Path) -> None:
    image.write_text(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n"
        f'createType="monolithicFlat"\nRW 128 FLAT "{secret}" 0\n'
        'ddb.adapterType = "ide"\nddb.geometry.cylinders = "1"\n'
    )


@pytest.mark.parametrize(
    ("attack", "format_"),
    [
        (backing_file, "qcow2"),
        # CVE-2026-24708: a guest writes a qcow2 header over its raw disk, and a host probes it.
        (backing_file, ""),
        (external_data_file, "qcow2"),
        (extent_of_a_vmdk, "vmdk"),
    ],
)
def test_another_file_cannot_be_read(
    attack: Callable[[Path, Path], None], format_: str, tmp_path: Path, secret: Path, output: Path
) -> None:
    image = tmp_path / "image"
    attack(image, secret)
    assert SECRET in stolen(image, tmp_path, format_), "the attack is a real one"
    check_nothing_got_out(image, output, format_)


def test_the_network_cannot_be_reached(tmp_path: Path, output: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        port = server.getsockname()[1]
        image = tmp_path / "image"
        backing = json.dumps(
            {
                "driver": "raw",
                "file": {
                    "driver": "nbd",
                    "server": {"type": "inet", "host": "127.0.0.1", "port": str(port)},
                },
            }
        )
        qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", f"json:{backing}", "-F", "raw", image, "1M")
        words = ["qemu-img", "info", "-f", "qcow2", "--backing-chain", str(image)]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as free:
            connection, _ = server.accept()
            connection.close()
            free.wait(120)
        server.settimeout(0.0)
        check_nothing_got_out(image, output, "qcow2")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_there_are_no_sockets_no_processes_and_no_namespaces() -> None:
    for lines in (
        ("socket.socket()",),
        ("socket.socket(socket.AF_UNIX)",),
        ("socket.socketpair()",),
        ("os.fork()",),
        ("os.posix_spawn('/usr/bin/true', ['true'], {})",),
    ):
        assert attempt(*lines) == "PermissionError", lines
    calls = {"unshare": (0x10000000,), "mount": (0, 0, 0, 0, 0), "ptrace": (0, 0, 0, 0)}
    for name, arguments in calls.items():
        line = f"f = ctypes.CDLL(None, use_errno=True).{name}"
        call = f"assert f{arguments} == -1"
        raised = "raise OSError(ctypes.get_errno(), 'no')"
        assert attempt(line, call.replace(",)", ")"), raised) == "PermissionError", name


def test_threads_are_allowed() -> None:
    program = "import threading\nt = threading.Thread(target=lambda: print('7'))\nt.start(); t.join()"
    assert python(program) == 7


def test_there_are_no_other_files(output: Path, secret: Path) -> None:
    found = python("print(json.dumps(sorted(os.listdir('/'))))", secret, output)
    assert isinstance(found, list)
    assert set(found) <= {"bin", "in", "lib", "lib32", "lib64", "out", "sbin", "tmp", "usr"}
    for path in ("/etc/passwd", "/proc/self/status", "/dev/null", "/sys", str(secret)):
        assert attempt(f"open({path!r})") == "FileNotFoundError"
    assert python("print(json.dumps(os.listdir('/in')))", secret, output) == ["disk"]


def test_nothing_but_the_output_can_be_written(output: Path, secret: Path) -> None:
    program = """
r = []
for path in ('/in/disk', '/in/new', '/new', '/tmp/new', '/usr/new', '/out/new'):
    try:
        open(path, 'a').close()
        r.append('done')
    except OSError as e:
        r.append(os.strerror(e.errno))
print(json.dumps(r))
"""
    *others, last = python(program, secret, output)
    assert last == "done"
    assert set(others) == {"Read-only file system"}
    assert secret.read_bytes().startswith(SECRET)


def test_the_source_cannot_be_written_by_its_descriptor_either(secret: Path, output: Path) -> None:
    program = """
r = []
for number in range(3, 64):
    try:
        os.write(number, b'x')
        r.append(number)
    except OSError:
        pass
print(json.dumps(r))
"""
    assert python(program, secret, output) == []
    assert secret.read_bytes().startswith(SECRET)


def test_nothing_of_our_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMJOBS_TOKEN", "secret")
    found = python("print(json.dumps(dict(os.environ)))")
    assert isinstance(found, dict)
    assert set(found) <= {"PATH", "LC_ALL", "MALLOC_ARENA_MAX", "PWD", "LC_CTYPE"}


def test_time_is_limited_and_nothing_is_left_behind() -> None:
    mark = uuid.uuid4().hex
    began = time.monotonic()
    program = f"import time, signal\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)  # {mark}"
    assert code_of(program, SandboxLimits(seconds=1.0)) == "too_long"
    assert time.monotonic() - began < 120
    wait_until(lambda: not mentioning(mark), 60, "no process of the sandbox is left")


#: Writes files of half a MiB, one after the other, until it is stopped.
FLOOD = """
import itertools, time
for number in itertools.count():
    with open(f'/out/{number}', 'wb', buffering=0) as file:
        file.write(bytes(1 << 19))
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("program", "limits", "code"),
    [
        ("while True: pass", {"cpu_seconds": 1, "seconds": 120}, "too_much_cpu"),
        ("x = bytearray(1 << 30)", {"memory": 256 * MIB}, "conversion_failed"),
        ("open('/out/big', 'wb').write(bytes(1 << 22))", {"file_size": MIB}, "too_much_output"),
        (
            "import os\nos.truncate(os.open('/out/hole', os.O_CREAT | os.O_RDWR), 1 << 40)",
            {"file_size": MIB},
            "too_much_output",
        ),
        (FLOOD, {"file_size": MIB, "written": 8 * MIB, "seconds": 120}, "too_much_output"),
        ("import os, time\nos.mkdir('/out/hidden')\ntime.sleep(600)", {}, "conversion_failed"),
    ],
    ids=["processor", "memory", "a file", "a hole", "all files", "directories"],
)
def test_what_a_program_uses_is_limited(
    output: Path, program: str, limits: dict[str, Any], code: str
) -> None:
    assert code_of(program, SandboxLimits(**{"seconds": 60, **limits}), output) == code
    assert all(path.stat().st_size <= MIB for path in output.iterdir() if path.is_file())


def code_of(program: str, limits: SandboxLimits, output: Path | None = None) -> str:
    with pytest.raises(ImageRejected) as caught:
        sandbox.run(("python3", "-c", program), output=output, limits=limits)
    return caught.value.faults[0].code


def test_a_flood_of_words_is_taken_in_bounded_memory() -> None:
    count = 0

    def on_output(data: bytes) -> None:
        nonlocal count
        count += len(data)

    program = (
        "import sys\nfor _ in range(100):\n    print('x' * 100000); sys.stderr.write('y' * 100000)"
    )
    sandbox.run(("python3", "-c", program), limits=LIMITS, on_output=on_output)
    assert count == 100 * 100001


def test_a_failure_is_told_in_the_programs_words() -> None:
    with pytest.raises(ImageRejected, match="the reason") as caught:
        sandbox.run(("python3", "-c", "raise SystemExit('the reason')"), limits=LIMITS)
    assert len(caught.value.message) < 2000


def test_without_a_sandbox_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab: Lab
) -> None:
    script = "echo bwrap: No permissions to creating new namespace >&2; exit 1"
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (broken / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{os.environ['PATH']}")
    with pytest.raises(Unavailable, match="No permissions") as caught:
        convert(lab.samples["qcow2-v3"], tmp_path, "qcow2")
    assert caught.value.service == "sandbox"
    assert "user namespaces" in caught.value.hint
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(Unavailable, match="not installed"):
        sandbox.require()


def test_the_filter_is_a_program_that_the_kernel_takes() -> None:
    for machine in ("x86_64", "aarch64"):
        program = build_filter(("socket", "fork"), clone_without=CLONE_THREAD, machine=machine)
        lines = list(struct.iter_unpack("=HBBI", program))
        # Every jump stays inside the program, and the last line returns.
        for number, (code, yes, no, _) in enumerate(lines):
            if code & 7 == 5:
                assert number + 1 + max(yes, no) < len(lines)
        assert lines[-1][0] == 6
    with pytest.raises(Unavailable, match="riscv64"):
        build_filter((), machine="riscv64")


@pytest.mark.skipif(os.geteuid() != 0, reason="everything here ran unprivileged already")
def test_an_unprivileged_user_has_the_sandbox_too(lab: Lab) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(shutil.copy(lab.samples["qcow2-v3"], scratch))
        for path in (Path(scratch), image):
            os.chown(path, NOBODY, NOBODY)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                convert(image, Path(scratch), "qcow2")
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        result = Path(scratch) / "disk"
        assert result.read_bytes() == disk()
        assert result.stat().st_uid == NOBODY


def test_the_file_that_was_opened_is_what_is_seen(lab: Lab, tmp_path: Path) -> None:
    """The program does not get a file that replaces it after inspection."""
    path = lab.copy("qcow2-v3", "image")
    on_output = bytearray()
    with path.open("rb") as file:
        path.rename(tmp_path / "moved")
        path.write_bytes(b"another file")
        sandbox.run(("head", "-c", "4", SOURCE), source=file, limits=LIMITS, on_output=on_output.extend)
    assert on_output == b"QFI\xfb"
