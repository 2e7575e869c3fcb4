# ruff: noqa: UP006, UP035
"""The guest contract, version 3, for images with cloud-init, which have Python.

One file without dependencies, for Python 3.6 and later: ``images/cloudinit.py`` puts it into the user
data of jobs that bring none of their own. It reads the job disk, runs the script, writes its outputs to
the output disk, reports its exit status, and powers the VM off.
"""

import contextlib
import errno
import fcntl
import glob
import http.client
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

HOME = Path("/var/lib/vmjobs")
WORK = HOME / "work"
SCRIPT = HOME / "script"
STREAMS = ("stdout", "stderr")
MAX_CHUNK = 1024 * 1024
#: The most bytes of the list of omitted outputs, and its words for types of files.
MAX_UNDELIVERED = MAX_CHUNK // 2
OMITTED_TYPES = {
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
#: Seconds after each try of a request that may succeed later.
RETRY_PAUSES = (1, 2, 4, 8, 0)
DRAIN_SECONDS = 2.0
FLUSH_SECONDS = 120.0
F_SETPIPE_SZ = 1031
#: e2fsck(8): up to this exit status all errors have been repaired.
REPAIRED_STATUS = 3
PREFIXES = ("vd", "ubd", "xvd", "sd")


class GuestFailure(Exception):
    """The guest cannot run the job; the console shows the message."""


def say(text: str) -> None:
    """Print a line on the console, and on the serial port if that is another device."""
    targets = [Path("/dev/console")]
    with contextlib.suppress(OSError):
        if "ttyS0" not in Path("/sys/class/tty/console/active").read_text().split():
            targets.append(Path("/dev/ttyS0"))
    for target in targets:
        with contextlib.suppress(OSError), target.open("wb", buffering=0) as console:
            console.write(f"\r\n{text}\r\n".encode("utf-8", "replace"))


def may_succeed_later(status: int) -> bool:
    """Whether a second try may succeed; 0: there was no answer."""
    return status in (0, 408, 429) or status >= 500


class EndpointClient:
    """Client of the guest endpoint."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.address = urllib.parse.urlsplit(endpoint).netloc
        self.token = token
        #: The host has neither accepted nor refused some output; the exit report says so.
        self.undelivered = False
        #: Requests that are being sent.
        self.sending = []  # type: List[str]

    def request_with_retries(self, method: str, path: str, body: bytes = b"") -> Tuple[int, bytes]:
        """Send a request, with retries; return status (0: no answer) and text."""
        status, answer = 0, b""
        for pause in RETRY_PAUSES:
            try:
                status, answer = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                status, answer = 0, str(error).encode()
            if not may_succeed_later(status):
                break
            time.sleep(pause)
        return status, answer

    def send(self, path: str, body: bytes) -> int:
        """Post output of the script; return the status."""
        self.sending.append(path)
        status, _ = self.request_with_retries("POST", path, body)
        if may_succeed_later(status):
            self.undelivered = True
        self.sending.remove(path)
        return status

    def post_required(self, path: str, body: bytes = b"") -> None:
        """Post a report that the host must receive before the job goes on."""
        status, _ = self.request_with_retries("POST", path, body)
        if not 200 <= status < 300:
            raise GuestFailure(f"POST {path} failed (status {status})")

    def _once(self, method: str, path: str, body: bytes) -> Tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=60.0)
        headers = {"Authorization": f"Bearer {self.token}"}
        headers["Content-Type"] = "application/octet-stream"
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


# --------------------------------------------------------------------------- disks


def find_disks() -> Tuple[Path, Path, Path]:
    """Return job disk, scratch disk and output disk, which follow one another."""
    for prefix in PREFIXES:
        for letter in "abcdefgh":
            if is_job_disk(Path(f"/dev/{prefix}{letter}")):
                job, scratch, output = (Path(f"/dev/{prefix}{chr(ord(letter) + n)}") for n in range(3))
                return job, scratch, output
    raise GuestFailure("there is no job disk")


def is_job_disk(device: Path) -> bool:
    """Whether the device begins with a job's tar stream."""
    try:
        with device.open("rb") as file:
            head = file.read(512)
    except OSError:
        return False
    return head.startswith(b"job.json\0") and head[257:262] == b"ustar"


def make_scratch(device: Path) -> None:
    """Mount the scratch disk for the job; use the root disk if it cannot be formatted."""
    HOME.mkdir(parents=True, exist_ok=True)
    if run_program("mkfs.ext4", "-q", "-F", "-m", "0", str(device)):
        run_program("mount", "-o", "noatime", str(device), str(HOME))
    make_directories()


def keep_scratch(device: Path) -> None:
    """Mount the scratch disk of an earlier VM; remove only its script's files.

    The host has made the file system. It is repaired as far as that is safe, and never formatted.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    try:
        damage = (
            subprocess.call(("e2fsck", "-p", str(device)), stdin=subprocess.DEVNULL) > REPAIRED_STATUS
        )
    except OSError:
        damage = False  # the image has no e2fsck: the kernel decides
    if damage or not run_program("mount", "-o", "noatime", str(device), str(HOME)):
        raise GuestFailure(
            "the kept disk cannot be mounted and is left unchanged: repair it on its node with e2fsck, "
            "or restore it from a backup"
        )
    run_program("rm", "-rf", *(str(HOME / name) for name in ("script", "work", "home", "tmp")))
    make_directories()


def make_directories() -> None:
    """Make the directories of the job and of its user."""
    for name in ("work", "home", "tmp"):
        (HOME / name).mkdir(exist_ok=True)
    (HOME / "tmp").chmod(0o1777)


def run_program(*argv: str) -> bool:
    """Run a program; false if it fails or the image lacks it."""
    try:
        return subprocess.call(argv, stdin=subprocess.DEVNULL) == 0
    except OSError:
        return False


def unpack(archive: tarfile.TarFile) -> None:
    """Unpack script and inputs. The host made this archive, so names are trusted."""
    for entry in archive:
        content = archive.extractfile(entry)
        if content is None:
            continue
        if entry.name == "script":
            target, mode = SCRIPT, 0o755
        elif entry.name.startswith("inputs/"):
            target, mode = WORK / entry.name[len("inputs/") :], 0o644
        else:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            shutil.copyfileobj(content, file, MAX_CHUNK)
        target.chmod(mode)


# --------------------------------------------------------------------------- the script


def start_script(job: Dict[str, Any], out: Any, err: Any) -> "subprocess.Popen[bytes]":
    """Start the script without the token, in its own session so that signals reach all."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(HOME / "home"),
        "TMPDIR": str(HOME / "tmp"),
        "LANG": "C.UTF-8",
        "VMJOBS_JOB_ID": job["job_id"],
        "VMJOBS_ARRAY_INDEX": str(job["index"]),
        "VMJOBS_ARRAY_COUNT": str(job["count"]),
    }
    environment.update(job["environment"])
    argv = [str(SCRIPT), *job["arguments"]]
    options = {
        "cwd": str(WORK),
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": out,
        "stderr": err,
        "start_new_session": True,
    }  # type: Dict[str, Any]
    try:
        return subprocess.Popen(argv, **options)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise GuestFailure(f"the script cannot be run: {error}") from error
        return subprocess.Popen(["/bin/sh", *argv], **options)


def kill_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the script's process group."""
    with contextlib.suppress(OSError):  # all processes have ended
        os.killpg(process.pid, number)


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the script; return its status. SIGTERM is passed on to it."""
    signal.signal(signal.SIGTERM, lambda *_: kill_group(process, signal.SIGTERM))
    return int(process.wait())


def send_output(host: EndpointClient, name: str, handle: int) -> None:
    """Send the script's output to the host as soon as it appears."""
    offset = 0
    while True:
        chunk = os.read(handle, MAX_CHUNK)
        if not chunk:
            return
        status = host.send(f"/v1/log/{name}?offset={offset}", chunk)
        if not 200 <= status < 300:
            say(f"vmjobs: error: std{name} lost bytes ({status})")
        offset += len(chunk)


def deliver_signals(host: EndpointClient, process: "subprocess.Popen[bytes]") -> None:
    """Request signals repeatedly, which is also the heartbeat, and deliver them."""
    delivered = 0  # the host repeats signals that are not acknowledged: an answer may be lost
    while process.poll() is None:
        status, signals = host.request_with_retries("GET", f"/v1/control?wait=25&done={delivered}")
        for line in signals.decode("ascii", "replace").splitlines() if status == 200 else ():
            words = line.split()
            if len(words) == 2 and words[0] == "signal" and words[1].isdigit():
                kill_group(process, int(words[1]))
                delivered += 1
        if status != 200:
            time.sleep(1)


def make_pipe() -> Tuple[int, int]:
    """Make a large pipe, so that a script with much output causes fewer requests."""
    reader, writer = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(writer, F_SETPIPE_SZ, MAX_CHUNK)
    return reader, writer


def run_online(job: Dict[str, Any], host: EndpointClient) -> int:
    """Run the script; its output goes to the endpoint."""
    ends = {"out": make_pipe(), "err": make_pipe()}
    process = start_script(job, ends["out"][1], ends["err"][1])
    for _, writer in ends.values():
        os.close(writer)
    pumps = [
        threading.Thread(target=send_output, args=(host, name, ends[name][0]), daemon=True)
        for name in ends
    ]
    signals = threading.Thread(target=deliver_signals, args=(host, process), daemon=True)
    for thread in (*pumps, signals):
        thread.start()
    status = wait_for(process)
    # Processes that the script left get some time to finish their output, then they are killed.
    for seconds in (DRAIN_SECONDS, FLUSH_SECONDS):
        deadline = time.time() + seconds
        for thread in pumps:
            thread.join(max(0.0, deadline - time.time()))
        kill_group(process, signal.SIGKILL)
    if host.sending:
        say("vmjobs: error: the logs are incomplete")
        host.undelivered = True
    return status


def run_offline(job: Dict[str, Any]) -> int:
    """Run the script; its output goes to files."""
    with (HOME / "stdout").open("wb") as out, (HOME / "stderr").open("wb") as err:
        process = start_script(job, out, err)
        status = wait_for(process)
        kill_group(process, signal.SIGKILL)
    return status


# --------------------------------------------------------------------------- outputs


def find_outputs(globs: List[str]) -> Iterator[Tuple[str, str]]:
    """Yield matching names, without directories, each with "" or why it is not sent."""
    os.chdir(str(WORK))
    inside, seen = WORK.resolve(), set()
    for pattern in globs:
        for name in sorted(glob.glob(pattern)):  # noqa: PTH207 - as a shell: hidden files are hidden
            kind = stat.S_IFMT(os.lstat(name).st_mode)
            if name in seen or kind == stat.S_IFDIR:
                continue
            seen.add(name)
            omission = OMITTED_TYPES.get(kind, "")
            if not omission and inside not in Path(name).resolve().parents:
                omission = "outside"
            yield name, omission


def quote_name(name: str) -> str:
    """Return the percent-encoded name."""
    return urllib.parse.quote(os.fsencode(name))


def add_file(tar: tarfile.TarFile, name: str, text: str) -> None:
    """Add a file with this content."""
    entry, content = tarfile.TarInfo(name), text.encode()
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def write_output_disk(device: Path, result: str, globs: List[str], streams: Tuple[str, ...]) -> bool:
    """Write the tar stream; return whether it is complete.

    The exit status comes first, so that it arrives even if writing fails later. streams: files with the
    script's output, if it did not go to the endpoint.
    """
    key, _, number = result.partition("=")
    try:
        with device.open("r+b") as disk:
            left = disk.seek(0, os.SEEK_END) - 65536 - sum((HOME / n).stat().st_size for n in streams)
            disk.seek(0)
            fitting, others = [], []
            for name, omission in find_outputs(globs):
                size = os.lstat(name).st_size
                # 2560: the header, with a long name, and the padding of the last block.
                if not omission and size + 2560 <= left:
                    left -= size + 2560
                    fitting.append(name)
                else:
                    others.append(f"{omission or size} {quote_name(name)}\n")
                    left -= len(others[-1])
            with tarfile.open(fileobj=disk, mode="w|", format=tarfile.GNU_FORMAT) as tar:
                add_file(tar, "exit.json", json.dumps({key: int(number)}))
                for name in streams:
                    tar.add(str(HOME / name), name)
                if others:
                    add_file(tar, "undelivered", "".join(others)[:MAX_UNDELIVERED])
                for name in fitting:
                    tar.add(str(WORK / name), f"outputs/{name}")
            disk.flush()
            os.fsync(disk.fileno())
    except OSError as error:
        say(f"vmjobs: error: the output disk: {error}")
        return False
    return True


def disk_full() -> bool:
    """Whether the job's disk has no free space or no free inodes."""
    room = os.statvfs(str(HOME))
    return room.f_bavail * room.f_frsize < 65536 or room.f_favail == 0


# --------------------------------------------------------------------------- main


def main() -> None:
    """Run the job, from the job disk to the exit report."""
    job_disk, scratch_disk, output_disk = find_disks()
    with tarfile.open(str(job_disk), "r:") as tar:
        described = tar.extractfile("job.json")
        job = json.loads(described.read().decode() if described else "{}")
        if job.get("contract") != 3:
            raise GuestFailure("the host uses another version of the guest contract (expected 3)")
        (keep_scratch if job.get("keep") else make_scratch)(scratch_disk)
        unpack(tar)
    host, online = EndpointClient(job["endpoint"], job["token"]), bool(job["endpoint"])
    mark = f"vmjobs:{job['sentinel']}:"
    if not SCRIPT.exists():
        raise GuestFailure("the job has no script")
    if online:
        host.post_required("/v1/ready")
    say(f"{mark}ready")
    status = run_online(job, host) if online else run_offline(job)
    result = f"code={status}" if status >= 0 else f"signal={-status}"
    note = f"{result} disk=full" if status != 0 and disk_full() else result
    say(f"{mark}collecting {note}")
    if online:
        host.post_required("/v1/collecting", note.encode())
    if not write_output_disk(output_disk, result, job["outputs"], () if online else STREAMS):
        host.undelivered = True
    note = f"{result} undelivered=yes" if host.undelivered else result
    say(f"{mark}exit {note}")
    if online:
        host.post_required("/v1/exit", note.encode())


def power_off() -> None:
    """Power off at once: the disks are discarded, and the output disk is flushed."""
    for argv in (("systemctl", "poweroff", "-ff"), ("poweroff", "-f"), ("busybox", "poweroff", "-f")):
        run_program(*argv)
    Path("/proc/sysrq-trigger").write_text("o")


if __name__ == "__main__":
    try:
        main()
    except Exception as problem:  # the host must learn of any error, instead of waiting
        say(f"vmjobs: error: {type(problem).__name__}: {problem}")
    power_off()
