"""Uploads: speed, memory, and the amount sent of a changed image."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.api_service import service, timed
from bench.figures import Finding, compare, spread
from tests.kit.counting_proxy import proxy_to

MIB = 1024 * 1024
#: Size of the disk whose upload is timed, and of the one that is changed.
DISK_MIB = 1024
CHANGED_MIB = 512
#: The file system's block size, in which changes are counted.
FS_BLOCK = 4096
#: Files added to an image before it is pushed again; the largest of them, in bytes.
FILES = 40
LARGEST = 512 * 1024
RAW = ("--format", "raw", "--boot", "kernel")


def image_upload(pairs: int) -> Iterator[Finding]:
    """Benchmark 4: ``vmjobs image push`` against ``sha256sum`` of the same file."""
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as name:
        home = Path(name)
        disk, tiny = home / "disk.img", home / "tiny.img"
        make_disk(disk, DISK_MIB)
        tiny.write_bytes(bytes(MIB) + os.urandom(4096))
        times: list[tuple[float, float]] = []
        growth: list[float] = []
        sent = 0
        for number in range(pairs + 1):
            theirs = timed(["sha256sum", str(disk)]).seconds if number % 2 else 0.0
            with service(home / f"pair{number}") as api:
                before = api.vmjobs("image", "push", tiny, "tiny", *RAW).memory
                pushed = api.vmjobs("image", "push", disk, "disk", "--json", *RAW)
            theirs = theirs or timed(["sha256sum", str(disk)]).seconds
            sent = json.loads(pushed.out)["sent"]
            shutil.rmtree(home / f"pair{number}")
            if number:  # the first pair warms the page cache
                times.append((pushed.seconds, theirs))
                growth.append((pushed.memory - before) / 1024)
        details = {"disk, MiB": DISK_MIB, "sent, MiB": sent / MIB, "growth, MiB": growth}
        what = f"push {DISK_MIB} MiB / sha256sum of it"
        yield compare(4, what, times, 0.7, measure="MB/s / MB/s", at_most=False, details=details)
        yield Finding(
            4,
            "push: memory beside that of a tiny push",
            growth,
            [],
            "MiB",
            max(growth),
            spread(growth),
            64,
            details=details,
            unit="MiB",
        )


def image_changed(pairs: int) -> Iterator[Finding]:
    """Benchmark 3: add files to an ext4 image, and push it again."""
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as name:
        home = Path(name)
        disk, old = home / "disk.img", home / "old.img"
        make_disk(disk, CHANGED_MIB)
        found: list[tuple[float, float]] = []
        with service(home / "service") as api, proxy_to(api.config.listen) as proxy:
            api.vmjobs("image", "push", disk, "disk:0", *RAW, url=proxy.url)
            for number in range(1, pairs + 1):
                shutil.copyfile(disk, old)
                add_files(disk, home, number)
                before = proxy.up
                api.vmjobs("image", "push", disk, f"disk:{number}", *RAW, url=proxy.url)
                found.append(((proxy.up - before) / 1e6, changed_bytes(old, disk) / 1e6))
        details = {"disk, MiB": CHANGED_MIB, "files added": FILES, "largest, bytes": LARGEST}
        measure = "bytes sent / changed"
        yield compare(
            3, "push of a changed disk", found, 2.0, measure=measure, details=details, unit="MB"
        )


def make_disk(path: Path, mib: int) -> None:
    """Make an ext4 file system of this host's files, two thirds full, as installers leave it."""
    tree = path.with_suffix(".tree")
    left = mib * MIB * 2 // 3
    for source in sorted(Path("/usr/lib").rglob("*")):
        if left <= 0:
            break
        if source.is_file() and not source.is_symlink():
            target = tree / source.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            left -= source.stat().st_size
    with path.open("wb") as file:
        file.truncate(mib * MIB)
    command = ["/usr/sbin/mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(path)]
    subprocess.run(command, check=True)
    shutil.rmtree(tree)


def add_files(disk: Path, home: Path, seed: int) -> None:
    """Write files of random bytes, small and large ones, into a new directory."""
    dice = random.Random(seed)
    orders = [f"mkdir new{seed}"]
    for number in range(FILES):
        file = home / f"file{number}"
        file.write_bytes(dice.randbytes(int(LARGEST ** dice.uniform(0.5, 1))))
        orders.append(f"write {file} new{seed}/file{number}")
    script = home / "orders"
    script.write_text("\n".join(orders) + "\n")
    debugfs = ["/usr/sbin/debugfs", "-w", "-f", str(script), str(disk)]
    subprocess.run(debugfs, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def changed_bytes(old: Path, new: Path) -> int:
    """Bytes of the file system's blocks that have changed."""
    count = 0
    with old.open("rb") as before, new.open("rb") as after:
        while ours := after.read(MIB):
            theirs = before.read(MIB)
            if ours != theirs:
                count += sum(
                    ours[at : at + FS_BLOCK] != theirs[at : at + FS_BLOCK]
                    for at in range(0, len(ours), FS_BLOCK)
                )
    return count * FS_BLOCK
