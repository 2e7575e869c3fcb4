"""Boots images for real, under UML or QEMU, with an endpoint of the test's own."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from vmjobs.hypervisor.base import BootImage
from vmjobs.model import MIB

ROOT = Path(__file__).parents[2]
STORE = ROOT / "build" / "images"
WORK = ROOT / "build" / "work"
TOKEN = "t0ken"
SENTINEL = "5e117e1"
#: Boot, job and power-off under UML, on a machine that has other work as well; in seconds.
DEADLINE = 90.0


def need(*programs: str) -> None:
    """Fail where a program is missing: what these tests would have shown stays unknown."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}")


@dataclass
class Endpoint:
    """What a guest is given and what it said. answer: may replace an answer, by (method, path)."""

    script: bytes
    inputs: dict[str, bytes] = field(default_factory=dict)
    answer: Callable[[str, str], int | None] = lambda _method, _path: None
    logs: dict[str, bytearray] = field(default_factory=lambda: {"out": bytearray(), "err": bytearray()})
    outputs: dict[str, bytes] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    bad_token: bool = False
    orders: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def job_tar(self) -> bytes:
        """Script and inputs."""
        files = {"script": self.script, **{f"inputs/{n}": d for n, d in self.inputs.items()}}
        return tar_of(files)

    def send_signal(self, number: int) -> None:
        """Have the guest deliver a signal."""
        with self.changed:
            self.orders.append(f"signal {number}\n")
            self.changed.notify_all()

    def wait_for_log(self, text: bytes, timeout: float = DEADLINE) -> None:
        """Until ``text`` is in the standard output."""
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.logs["out"], timeout), bytes(
                self.logs["out"]
            )

    def wait_for_request(self, line: str, count: int, timeout: float = DEADLINE) -> None:
        """Until this request has come ``count`` times."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen.count(line) >= count, timeout), self.seen


def tar_of(files: dict[str, bytes]) -> bytes:
    """A tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if name == "script" else 0o444
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        state = self._begin(b"")
        if state is None:
            return
        if self.path == "/v1/job.tar":
            self._answer(200, state.job_tar())
        elif self.path.startswith("/v1/control"):
            with state.changed:
                state.changed.wait_for(lambda: state.orders, 5)
                text = "".join(state.orders)
                state.orders.clear()
            self._answer(200, text.encode())
        else:
            self._answer(404, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        state = self._begin(body)
        if state is None:
            return
        path, _, query = self.path.partition("?")
        with state.changed:
            if path.startswith("/v1/log/"):
                log = state.logs[path.rpartition("/")[2]]
                offset = int(query.removeprefix("offset="))
                assert offset <= len(log), (offset, len(log))
                log[offset:] = body
            elif path.startswith("/v1/outputs/"):
                state.outputs[unquote(path.removeprefix("/v1/outputs/"))] = body
            else:
                state.words[path.rpartition("/")[2]] = body.decode()
            state.changed.notify_all()
        self._answer(201 if path.startswith("/v1/outputs/") else 204, b"")

    def _begin(self, _body: bytes) -> Endpoint | None:
        state = self.server.state
        with state.changed:
            state.seen.append(f"{self.command} {self.path}")
            state.changed.notify_all()
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                state.bad_token = True
            status = state.answer(self.command, self.path)
        if status is None:
            return state
        self._answer(status, b"no")
        return None

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    state: Endpoint


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[str]:
    """The endpoint on a port of the host's loopback; its URL as the guest sees it."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.state = endpoint
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://10.0.2.2:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Ended:
    """A guest that is gone. disk: what was on the output disk, by name."""

    console: str
    seconds: float
    disk: dict[str, bytes]
    members: list[tarfile.TarInfo]

    @property
    def exit(self) -> dict[str, int]:
        """The exit report on the output disk."""
        value: dict[str, int] = json.loads(self.disk["exit.json"])
        return value

    def said(self, word: str) -> str:
        """What follows this run's sentinel ``word`` on the console."""
        mark = f"vmjobs:{SENTINEL}:{word}"
        lines = [line.strip("\r ") for line in self.console.splitlines()]
        found = [line for line in lines if line.startswith(mark)]
        assert len(found) == 1, self.console
        return found[0].removeprefix(mark).strip()


@dataclass
class Guest:
    """A machine that is about to run one job."""

    image: BootImage
    folder: Path
    script: bytes = b""
    inputs: dict[str, bytes] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""
    disk: int = 256
    job_disk: bytes | None = None

    def _write_disks(self) -> None:
        variables = {
            "VMJOBS_CONTRACT": "1",
            "VMJOBS_JOB_ID": "job-1",
            "VMJOBS_ATTEMPT": "a" * 32,
            "VMJOBS_ARRAY_INDEX": "3",
            "VMJOBS_ARRAY_COUNT": "5",
            "VMJOBS_ENDPOINT": self.endpoint,
            "VMJOBS_TOKEN": TOKEN,
            "VMJOBS_NETWORK": "repository" if self.endpoint else "none",
            "VMJOBS_SENTINEL": SENTINEL,
            "VMJOBS_ARGUMENTS": shlex.join(self.arguments),
            "VMJOBS_EPOCH": str(int(time.time())),
        }
        exports = "".join(f"export {n}={shlex.quote(v)}\n" for n, v in self.environment.items())
        files = {
            "job.json": b"{}",
            "job.env": "".join(f"{n}={shlex.quote(v)}\n" for n, v in variables.items()).encode(),
            "environment": exports.encode(),
            "outputs": "".join(f"{glob}\n" for glob in self.outputs).encode(),
        }
        if not self.endpoint:
            files |= {"script": self.script, **{f"inputs/{n}": d for n, d in self.inputs.items()}}
        data = tar_of(files) if self.job_disk is None else self.job_disk
        (self.folder / "job").write_bytes(data + bytes(-len(data) % MIB))
        for name, size in (("scratch", self.disk), ("out", self.disk + 16)):
            with (self.folder / name).open("wb") as file:
                file.truncate(size * MIB)

    def uml(self, *, during: Callable[[], None] | None = None, deadline: float = DEADLINE) -> Ended:
        """Run under User Mode Linux; ``during`` is called while it runs."""
        need("linux.uml", "slirp-fullbolt")
        self._write_disks()
        # UML's own name for its control socket must be short.
        with tempfile.TemporaryDirectory(prefix="uml-") as short:
            command = ["linux.uml", "mem=512M", "root=/dev/ubda", "rw", "con=null", "con0=null,fd:1"]
            command += [f"uml_dir={short}", "umid=guest", f"hostfs={short}", "vmjobs=1"]
            # "s": no lock on the image, which QEMU guests may be reading.
            command += [f"ubd0s={self.folder}/cow,{self.image.root}", *self.image.cmdline]
            for number, name in enumerate(("job", "scratch", "out"), start=1):
                flags = "dr" if name == "job" else "d"
                command.append(f"ubd{number}{flags}={self.folder / name}")
            if self.endpoint:
                command.append(f"eth0=slirp,,{shutil.which('slirp-fullbolt')}")
            return self._run(command, {"TMPDIR": short, "HOME": short}, during, deadline)

    def qemu(self, *, deadline: float = DEADLINE) -> Ended:
        """Run under QEMU without hardware help."""
        need("qemu-system-x86_64", "qemu-img")
        self._write_disks()
        overlay = self.folder / "overlay.qcow2"
        make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(self.image.root)]
        subprocess.run([*make, str(overlay)], check=True)
        command = ["qemu-system-x86_64", "-M", "q35", "-accel", "tcg", "-cpu", "max", "-m", "512"]
        command += ["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"]
        command += ["-kernel", str(self.image.kernel), "-initrd", str(self.image.initrd)]
        words = ["root=/dev/vda", "rw", "console=ttyS0", *self.image.cmdline, "vmjobs=1"]
        command += ["-append", " ".join(words)]
        drive = f"file={overlay},format=qcow2,if=virtio,backing.file.locking=off"
        command += ["-drive", drive]
        for name in ("job", "scratch", "out"):
            more = ",readonly=on" if name == "job" else ""
            command += ["-drive", f"file={self.folder / name},format=raw,if=virtio{more}"]
        if self.endpoint:
            command += ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0"]
        return self._run(command, {}, None, deadline)

    def _run(
        self,
        command: list[str],
        environment: dict[str, str],
        during: Callable[[], None] | None,
        deadline: float,
    ) -> Ended:
        began = time.monotonic()
        console = self.folder / "console"
        with console.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
            )
            try:
                if during is not None:
                    during()
                process.wait(deadline)
            finally:
                process.kill()
                process.wait()
        text = console.read_bytes().decode("utf-8", "replace")
        members, disk = _read_tar(self.folder / "out")
        return Ended(text, time.monotonic() - began, disk, members)


def _read_tar(file: Path) -> tuple[list[tarfile.TarInfo], dict[str, bytes]]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(file, "r:") as archive:
            members = archive.getmembers()
            for member in members:
                source = archive.extractfile(member)
                found[member.name] = source.read() if source else b""
    except tarfile.ReadError:
        return [], {}
    return members, found
