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
LEFT_OUT = {
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
#: Seconds after each try of a request that may succeed later.
PAUSES = (1, 2, 4, 8, 0)
DRAIN_SECONDS = 2.0
FLUSH_SECONDS = 120.0
F_SETPIPE_SZ = 1031
#: e2fsck(8): up to this exit status all errors have been repaired.
MENDED = 3
PREFIXES = ("vd", "ubd", "xvd", "sd")


class Failure(Exception):
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


def may_change(status: int) -> bool:
    """Whether a second try may succeed; 0: there was no answer."""
    return status in (0, 408, 429) or status >= 500


class Host:
    """Client of the guest endpoint."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.address = urllib.parse.urlsplit(endpoint).netloc
        self.token = token
        #: The host has neither accepted nor refused some output; the exit report says so.
        self.undelivered = False
        #: Requests that are being sent.
        self.sending = []  # type: List[str]

    def ask(self, method: str, path: str, body: bytes = b"") -> Tuple[int, bytes]:
        """Send a request, with retries; return status (0: no answer) and text."""
        status, answer = 0, b""
        for pause in PAUSES:
            try:
                status, answer = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                status, answer = 0, str(error).encode()
            if not may_change(status):
                break
            time.sleep(pause)
        return status, answer

    def send(self, path: str, body: bytes) -> int:
        """Post output of the script; return the status."""
        self.sending.append(path)
        status, _ = self.ask("POST", path, body)
        if may_change(status):
            self.undelivered = True
        self.sending.remove(path)
        return status

    def must(self, path: str, body: bytes = b"") -> None:
        """Post a report that the host must receive before the job goes on."""
        status, _ = self.ask("POST", path, body)
        if not 200 <= status < 300:
            raise Failure(f"POST {path} failed (status {status})")

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
    raise Failure("there is no job disk")


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
    if succeeds("mkfs.ext4", "-q", "-F", "-m", "0", str(device)):
        succeeds("mount", "-o", "noatime", str(device), str(HOME))
    have_places()


def keep_scratch(device: Path) -> None:
    """Mount the scratch disk of an earlier VM; remove only its script's files.

    The host has made the file system. It is repaired as far as that is safe, and never formatted.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    try:
        damage = subprocess.call(("e2fsck", "-p", str(device)), stdin=subprocess.DEVNULL) > MENDED
    except OSError:
        damage = False  # the image has no e2fsck: the kernel decides
    if damage or not succeeds("mount", "-o", "noatime", str(device), str(HOME)):
        raise Failure(
            "the kept disk cannot be mounted and is left unchanged: repair it on its node with e2fsck, "
            "or restore it from a backup"
        )
    succeeds("rm", "-rf", *(str(HOME / name) for name in ("script", "work", "home", "tmp")))
    have_places()


def have_places() -> None:
    """Make the directories of the job and of its user."""
    for name in ("work", "home", "tmp"):
        (HOME / name).mkdir(exist_ok=True)
    (HOME / "tmp").chmod(0o1777)


def succeeds(*argv: str) -> bool:
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
            raise Failure(f"the script cannot be run: {error}") from error
        return subprocess.Popen(["/bin/sh", *argv], **options)


def kill_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the script's process group."""
    with contextlib.suppress(OSError):  # all processes have ended
        os.killpg(process.pid, number)


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the script; return its status. SIGTERM is passed on to it."""
    signal.signal(signal.SIGTERM, lambda *_: kill_group(process, signal.SIGTERM))
    return int(process.wait())


def pump(host: Host, name: str, handle: int) -> None:
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


def control(host: Host, process: "subprocess.Popen[bytes]") -> None:
    """Request signals repeatedly, which is also the heartbeat, and deliver them."""
    delivered = 0  # the host repeats signals that are not acknowledged: an answer may be lost
    while process.poll() is None:
        status, orders = host.ask("GET", f"/v1/control?wait=25&done={delivered}")
        for line in orders.decode("ascii", "replace").splitlines() if status == 200 else ():
            words = line.split()
            if len(words) == 2 and words[0] == "signal" and words[1].isdigit():
                kill_group(process, int(words[1]))
                delivered += 1
        if status != 200:
            time.sleep(1)


def pipe() -> Tuple[int, int]:
    """Make a large pipe, so that a script with much output causes fewer requests."""
    reader, writer = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(writer, F_SETPIPE_SZ, MAX_CHUNK)
    return reader, writer


def run_online(job: Dict[str, Any], host: Host) -> int:
    """Run the script; its output goes to the endpoint."""
    ends = {"out": pipe(), "err": pipe()}
    process = start_script(job, ends["out"][1], ends["err"][1])
    for _, writer in ends.values():
        os.close(writer)
    pumps = [
        threading.Thread(target=pump, args=(host, name, ends[name][0]), daemon=True) for name in ends
    ]
    orders = threading.Thread(target=control, args=(host, process), daemon=True)
    for thread in (*pumps, orders):
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


def outputs(globs: List[str]) -> Iterator[Tuple[str, str]]:
    """Yield matching names, without directories, each with "" or why it is not sent."""
    os.chdir(str(WORK))
    inside, seen = WORK.resolve(), set()
    for pattern in globs:
        for name in sorted(glob.glob(pattern)):  # noqa: PTH207 - as a shell: hidden files are hidden
            kind = stat.S_IFMT(os.lstat(name).st_mode)
            if name in seen or kind == stat.S_IFDIR:
                continue
            seen.add(name)
            left_out = LEFT_OUT.get(kind, "")
            if not left_out and inside not in Path(name).resolve().parents:
                left_out = "outside"
            yield name, left_out


def quoted(name: str) -> str:
    """Return the percent-encoded name."""
    return urllib.parse.quote(os.fsencode(name))


def add(tar: tarfile.TarFile, name: str, text: str) -> None:
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
            for name, left_out in outputs(globs):
                size = os.lstat(name).st_size
                # 2560: the header, with a long name, and the padding of the last block.
                if not left_out and size + 2560 <= left:
                    left -= size + 2560
                    fitting.append(name)
                else:
                    others.append(f"{left_out or size} {quoted(name)}\n")
                    left -= len(others[-1])
            with tarfile.open(fileobj=disk, mode="w|", format=tarfile.GNU_FORMAT) as tar:
                add(tar, "exit.json", json.dumps({key: int(number)}))
                for name in streams:
                    tar.add(str(HOME / name), name)
                if others:
                    add(tar, "undelivered", "".join(others)[:MAX_UNDELIVERED])
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
            raise Failure("the host uses another version of the guest contract (expected 3)")
        (keep_scratch if job.get("keep") else make_scratch)(scratch_disk)
        unpack(tar)
    host, online = Host(job["endpoint"], job["token"]), bool(job["endpoint"])
    mark = f"vmjobs:{job['sentinel']}:"
    if not SCRIPT.exists():
        raise Failure("the job has no script")
    if online:
        host.must("/v1/ready")
    say(f"{mark}ready")
    status = run_online(job, host) if online else run_offline(job)
    result = f"code={status}" if status >= 0 else f"signal={-status}"
    note = f"{result} disk=full" if status != 0 and disk_full() else result
    say(f"{mark}collecting {note}")
    if online:
        host.must("/v1/collecting", note.encode())
    if not write_output_disk(output_disk, result, job["outputs"], () if online else STREAMS):
        host.undelivered = True
    note = f"{result} undelivered=yes" if host.undelivered else result
    say(f"{mark}exit {note}")
    if online:
        host.must("/v1/exit", note.encode())


def power_off() -> None:
    """Power off at once: the disks are discarded, and the output disk is flushed."""
    for argv in (("systemctl", "poweroff", "-ff"), ("poweroff", "-f"), ("busybox", "poweroff", "-f")):
        succeeds(*argv)
    Path("/proc/sysrq-trigger").write_text("o")


if __name__ == "__main__":
    try:
        main()
    except Exception as problem:  # the host must learn of any error, instead of waiting
        say(f"vmjobs: error: {type(problem).__name__}: {problem}")
    power_off()
