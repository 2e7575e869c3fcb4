"""Copies of a suite's script: each in a VM, or on the host itself with the same files."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from node.bench.plan import Suite
from node.parts import run_locally
from vmjobs.agent.run.services import RunServices
from vmjobs.agent.vm.events import EventQueue, LeaseLost, SignalSent
from vmjobs.errors import InvalidRequest, VMJobsError
from vmjobs.hypervisor.base import BootImage
from vmjobs.local import LocalJob
from vmjobs.model import HypervisorKind, JobSpec, JobState, NetworkMode, StreamName
from vmjobs.subprocess import run
from vmjobs.terminal import ByteSink

#: Of a script's output, in bytes; figures come last, so earlier bytes are dropped.
_MAX_OUTPUT: Final = 1 << 20
_STAMP: Final = re.compile(rb"vmjobs-bench (begin|end) ([0-9]+)")
#: Account of native copies: some servers do not run as root.
_NOBODY: Final = "65534"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Deadline of a server, until it is ready.
_SERVER_SECONDS: Final = 60.0
#: Deadline for unpacking an image, in seconds.
_UNPACK_SECONDS: Final = 1800.0
#: Sources the image's own variables, as the guest program does, then runs the script.
_LAUNCH: Final = (
    "[ ! -r /etc/vmjobs/environment ] || . /etc/vmjobs/environment; cd /job/work && exec sh ../script"
)


@dataclass
class Output:
    """What a script has printed. on_ready: called once it waits for its start."""

    on_ready: Callable[[], object]
    text: bytearray = field(default_factory=bytearray)
    _is_ready: bool = False

    def write(self, data: bytes, /) -> None:
        self.text += data
        if not self._is_ready and b"\nready\n" in self.text:
            self._is_ready = True
            self.on_ready()
        del self.text[:-_MAX_OUTPUT]

    def flush(self) -> None:
        """Nothing is buffered."""

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = self.text.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass
class _Clock:
    """A console. Compares the guest's clock with the host's."""

    _rest: bytes = b""
    _stamps: dict[bytes, tuple[float, int]] = field(default_factory=dict)

    def write(self, data: bytes, /) -> None:
        """Look for the guest's stamps."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-4096:]
        for line in lines:
            if found := _STAMP.search(line):
                self._stamps[found[1]] = time.monotonic(), int(found[2])

    def flush(self) -> None:
        """Nothing is buffered."""

    @property
    def pace(self) -> float | None:
        """Seconds of the guest's clock in a second of the host's; None: not known."""
        if len(self._stamps) < 2:
            return None
        (host_began, began), (host_ended, ended) = self._stamps[b"begin"], self._stamps[b"end"]
        return (ended - began) / 1e9 / max(host_ended - host_began, 1e-9)


@dataclass(frozen=True)
class CopyResult:
    """The end of a copy. error: why it failed, or ``""``. pace: see :attr:`_Clock.pace`."""

    output: str
    error: str = ""
    pace: float = 1.0


class Copy(Protocol):
    """A copy of a script, used by one thread; others call ``start`` and ``stop``."""

    def run(self, on_ready: Callable[[], object]) -> CopyResult:
        """Run the script to its end. on_ready: called when it waits for ``start``."""

    def start(self) -> None:
        """Let the script begin."""

    def stop(self) -> None:
        """End the script early; also before it runs."""


class VmCopy:
    """A copy in a VM of its own."""

    def __init__(
        self,
        services: RunServices,
        kind: HypervisorKind,
        image: str,
        suite: Suite,
        environment: dict[str, str],
    ) -> None:
        self._services = services
        self._image = image
        self._events = EventQueue()
        self._spec = JobSpec(
            image=image,
            script=suite.whole_script,
            environment={**environment, "BENCH_SIDE": "vm"},
            cpus=suite.cpus,
            memory=suite.memory,
            disk=suite.disk,
            hypervisor=kind,
            network=NetworkMode.OUTBOUND if suite.server else NetworkMode.REPOSITORY,
            run_seconds=suite.seconds,
        )

    def run(self, on_ready: Callable[[], object]) -> CopyResult:
        output, errors, console = Output(on_ready), Output(lambda: None), _Clock()
        sinks: dict[StreamName, ByteSink] = {
            StreamName.OUT: output,
            StreamName.ERR: errors,
            StreamName.CONSOLE: console,
        }
        name = f"bench-{uuid.uuid4().hex[:12]}"
        with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as folder:
            job = LocalJob(name, self._spec, self._image, {}, Path(folder), lambda _report: None, sinks)
            try:
                outcome = run_locally(self._services, job, self._events)
            except VMJobsError as error:
                return CopyResult("", error.message)
        text = output.text.decode("utf-8", "replace")
        if outcome.state is not JobState.COMPLETED:
            said = errors.last_line or output.last_line
            return CopyResult(text, f"{outcome.reason.message}{said and f'; it printed last: {said}'}")
        if console.pace is None:
            return CopyResult(text, "its console does not show the guest's clock")
        return CopyResult(text, pace=console.pace)

    def start(self) -> None:
        self._events.put(SignalSent(signal.SIGUSR1))

    def stop(self) -> None:
        self._events.put(LeaseLost())


class NativeCopy:
    """A copy on the host: the image's files, the host's kernel, and namespaces (bubblewrap).

    cpus: that it may use, as many as its VM would have.
    """

    def __init__(
        self, tree: Path, work: Path, suite: Suite, cpus: tuple[int, ...], environment: dict[str, str]
    ) -> None:
        self._suite = suite
        self._work = work
        self._environment = environment
        self._command = ["taskset", "-c", ",".join(map(str, cpus))]
        self._command += _bwrap(tree, network=bool(suite.server))
        self._process: subprocess.Popen[bytes] | None = None
        self._why_stopped = ""
        self._lock = threading.Lock()

    def run(self, on_ready: Callable[[], object]) -> CopyResult:
        output = Output(on_ready)
        with tempfile.TemporaryDirectory(dir=self._work, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            _make_job_folder(folder, self._suite.whole_script)
            command = [*self._command, *_job_words(folder, self._environment)]
            with tempfile.TemporaryFile() as errors:
                with self._lock:
                    if why := self._stopped():
                        return CopyResult("", why)
                    pipe = subprocess.PIPE
                    process = subprocess.Popen(
                        command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True
                    )
                    self._process = process
                late = f"the script was still running after {self._suite.seconds} s"
                timer = threading.Timer(self._suite.seconds, self._kill, [late])
                timer.start()
                while process.stdout and (data := os.read(process.stdout.fileno(), 65536)):
                    output.write(data)
                status = process.wait()
                timer.cancel()
                errors.seek(max(0, errors.tell() - 4096))
                said = Output(lambda: None, bytearray(errors.read())).last_line
        text = output.text.decode("utf-8", "replace")
        if why := self._stopped():
            return CopyResult(text, why)
        said = said or output.last_line
        ended = f"the script ended with status {status}{said and f'; it printed last: {said}'}"
        return CopyResult(text, ended if status else "")

    def start(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has just ended
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()

    def stop(self) -> None:
        self._kill("it was stopped")

    def _stopped(self) -> str:
        """Return why it was stopped, or an empty text."""
        return self._why_stopped

    def _kill(self, why: str) -> None:
        with self._lock:
            self._why_stopped = self._why_stopped or why
            if self._process is not None:
                self._process.kill()  # its first process ends with it, and the namespace with that


def _bwrap(tree: Path, *, network: bool) -> list[str]:
    """Return the command of a container. network: the host's; otherwise it has none."""
    words = ["bwrap", "--unshare-all", "--unshare-user", *(["--share-net"] if network else [])]
    words += ["--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    words += ["--die-with-parent", "--clearenv"]
    for path in sorted(tree.iterdir()):
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), f"/{path.name}"]
        elif path.name not in {"dev", "proc", "run", "sys", "tmp", "job"}:
            words += ["--ro-bind", str(path), f"/{path.name}"]
    return [*words, "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--tmpfs", "/tmp"]  # noqa: S108 - its own


def _make_job_folder(folder: Path, script: str) -> None:
    for part in ("work", "home", "tmp"):
        (folder / part).mkdir()
    (folder / "script").write_text(script)


def _job_words(folder: Path, environment: dict[str, str]) -> list[str]:
    variables = {
        **environment,
        "BENCH_SIDE": "native",
        "PATH": _PATH,
        "HOME": "/job/home",
        "TMPDIR": "/job/tmp",
        "LANG": "C.UTF-8",
    }
    words = [word for pair in variables.items() for word in ("--setenv", *pair)]
    return [*words, "--bind", str(folder), "/job", "--", "sh", "-c", _LAUNCH]


@contextmanager
def served(
    tree: Path, work: Path, suite: Suite, environment: dict[str, str]
) -> Iterator[dict[str, str]]:
    """Run a suite's server on the host, if it has one; yield the environment of the copies.

    Raises:
        VMJobsError: it ends, or is not ready within a minute; with what it printed last.
    """
    if not suite.server:
        yield environment
        return
    with (
        tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as name,
        ExitStack() as stack,
    ):
        address = environment["BENCH_ADDRESS"]
        environment = {**environment, "BENCH_PORTS": " ".join(map(str, _free_ports(address, 3)))}
        _make_job_folder(Path(name), suite.server)
        errors = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [*_bwrap(tree, network=True), *_job_words(Path(name), environment)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        timer = threading.Timer(_SERVER_SECONDS, process.kill)
        timer.start()
        stack.callback(timer.cancel)
        if process.stdout is None or not process.stdout.readline():
            process.wait()
            errors.seek(0)
            said = Output(lambda: None, bytearray(errors.read(_MAX_OUTPUT))).last_line
            raise VMJobsError(f"the server of {suite.name} ended; it printed last: {said or 'nothing'}")
        timer.cancel()
        threading.Thread(target=process.stdout.read, name="server", daemon=True).start()
        yield environment


def _free_ports(address: str, number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((address, 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


def unpack_tree(image: BootImage, cache: Path) -> Path:
    """Unpack the files of an image's root disk, once; return their directory.

    Raises:
        InvalidRequest: it is not one ext4 file system.
        VMJobsError: debugfs, of e2fsprogs, is missing or fails.
    """
    tree = cache / image.digest.removeprefix("sha256:")
    if tree.is_dir():
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as name:
        fresh = Path(name) / "tree"
        fresh.mkdir()
        if '"' in name:
            raise InvalidRequest(f"cannot unpack an image into {cache}: its name has a quotation mark")
        run(["debugfs", "-R", f'rdump / "{fresh}"', image.root], timeout=_UNPACK_SECONDS)
        if not (fresh / "usr/bin").is_dir():
            raise InvalidRequest(
                f"the image {image.digest} is not one ext4 file system with /usr/bin",
                hint="measure an image that `vmjobs image build` made",
            )
        fresh.rename(tree)
    return tree


def missing_programs(tree: Path, suite: Suite) -> list[str]:
    places = [tree / place.lstrip("/") for place in _PATH.split(":")]
    return [
        name
        for name in suite.programs
        if not any(
            os.path.lexists(place / name.lstrip("/")) for place in ([tree] if "/" in name else places)
        )
    ]
