"""Images made without vmjobs, and jobs in them by the command line, as users run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from images.manifest import ImageManifest
from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.cli import vmjobs
from vmjobs.errors import NotFound
from vmjobs.model import BootMethod, Job, Report

BUILD = ROOT / "build" / "foreign"
#: What `tests/foreign/guest/muons` finds wherever awk computes correctly.
LIFETIME = "muon lifetime 2.220 +- 0.017 us from 20000 decays"
FIT = "lifetime_us,error_us,events\n2.2198,0.0171,20000\n"


@dataclass(frozen=True)
class Foreign:
    """An image. disk: its recipe. init: of a disk without a kernel. partition: of its root."""

    disk: str
    boot: BootMethod = BootMethod.KERNEL
    init: str = ""
    cloud_init: bool = False
    partition: int = 0

    @property
    def cmdline(self) -> tuple[str, ...]:
        return (f"init=/usr/local/sbin/{self.init}", "quiet") if self.init else ()


IMAGES = {
    "bios": Foreign("bios", BootMethod.BIOS),
    "uefi": Foreign("uefi", BootMethod.UEFI),
    "cloud": Foreign("cloud", BootMethod.BIOS, cloud_init=True),
    "cloud-uml": Foreign("cloud", cloud_init=True, partition=1),
    "bullseye": Foreign("bullseye", init="odd-poweroff"),
    "trixie": Foreign("trixie", init="odd-poweroff"),
}


def disk(name: str) -> Path:
    """The raw disk of this name, built if it does not exist."""
    command = ["sh", str(ROOT / "tests" / "foreign" / "build.sh"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def kernel() -> tuple[Path, Path]:
    """A kernel and its initial RAM disk, for disks that have none."""
    bios = disk("bios")
    return bios.with_suffix(".vmlinuz"), bios.with_suffix(".initrd")


def local_store() -> ImageStore:
    """The image store of `vmjobs run`; not where `make grid` looks for the library's images."""
    return ImageStore(BUILD / "store")


def imported(name: str, *, own_kernel: bool = False) -> str:
    """Add an image to the local store if it is not there; returns its name there.

    own_kernel: give a disk without a kernel one, which User-mode Linux does not boot.
    """
    store, image = local_store(), IMAGES[name]
    root = disk(image.disk)
    tag = root.with_suffix(".key").read_text("ascii")[:12] + "-kernel" * own_kernel
    try:
        store.resolve(f"{name}:{tag}")
    except NotFound:
        manifest = ImageManifest(
            boot=image.boot,
            root=store.folder.add_file(root),
            cloud_init=image.cloud_init,
            partition=image.partition,
        )
        if image.boot is BootMethod.KERNEL:
            parts: dict[str, object] = {"cmdline": image.cmdline}
            if own_kernel:
                linux, initrd = (store.folder.add_file(path) for path in kernel())
                parts |= {"kernel": linux, "initrd": initrd}
            manifest = manifest.model_copy(update=parts)
        store.tag(name, tag, store.put_manifest(manifest))
    return f"{name}:{tag}"


@dataclass
class LocalRun:
    """A finished `vmjobs run --json`. code: its exit status. said: by the script.

    report: the last.
    """

    code: int
    said: str
    report: Report
    console: str
    outputs: dict[str, str] = field(default_factory=dict)


def run(name: str, folder: Path, *options: str | Path, timeout: float = 900) -> LocalRun:
    """Run a job in this image; ``folder`` is for its outputs and for the node's state."""
    ref = imported(name, own_kernel="qemu" in options)
    place = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    files = ("--output-dir", place / "out", "--console", place / "console")
    done = vmjobs(
        "run", "--json", "--image", ref, "--disk", "64", *files, *options,
        image_dir=local_store().root, state_dir=folder / "state", timeout=timeout,
    )  # fmt: skip
    assert "kvm" not in done.err, "hypervisors that do not work here are no business of the user's"
    outcome = json.loads(done.out)
    report = Report.model_validate({name: outcome[name] for name in Report.model_fields})
    assert all(Path(output["file"]).is_file() for output in outcome["outputs"])
    outputs = {path.name: path.read_text() for path in (place / "out").glob("*") if path.is_file()}
    console = (place / "console").read_bytes().decode("utf-8", "replace").replace("\r", "")
    return LocalRun(done.code, done.err, report, console, outputs)


# --------------------------------------------------------------------------- on a grid


def as_format(source: Path, format: str, folder: Path) -> Path:
    """Copy a raw disk to another format with the user's own qemu-img."""
    target = folder / f"{source.stem}.{format}"
    command = ["qemu-img", "convert", "-f", "raw", "-O", format, str(source), str(target)]
    subprocess.run(command, check=True)
    return target


def tiny(folder: Path, mib: int) -> Path:
    """Make a disk for User-mode Linux with busybox and ``mib`` MiB of new random data."""
    tree = Path(tempfile.mkdtemp(prefix="tree-", dir=folder))
    for name in ("bin", "dev", "proc"):
        (tree / name).mkdir()
    shutil.copy("/bin/busybox", tree / "bin")
    (tree / "init").write_text("#!/bin/busybox sh\nexec /bin/busybox poweroff -f\n")
    (tree / "init").chmod(0o755)
    with (tree / "data").open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(1024 * 1024))
    target = tree.with_suffix(".img")
    command = ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(target), f"{mib + mib // 8 + 16}M"]
    subprocess.run(command, check=True, capture_output=True)
    shutil.rmtree(tree)
    return target


def with_unpacked_kernel(folder: Path) -> Path:
    """Copy the disk with GRUB, and add its kernel as /vmlinux: GRUB for Xen cannot unpack LZ4.

    The places in the file are those of Linux' Documentation/arch/x86/boot.rst.
    """
    target, unpacked = folder / "grub.img", folder / "vmlinux"
    shutil.copyfile(disk("bios"), target)
    image = kernel()[0].read_bytes()
    start = (image[0x1F1] + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    size = int.from_bytes(image[0x24C:0x250], "little") - len(b"SIZE")
    packed = image[start : start + size]
    done = subprocess.run(["lz4", "-dc"], input=packed, capture_output=True, check=True)
    unpacked.write_bytes(done.stdout)
    add = ["debugfs", "-w", "-R", f"write {unpacked} /vmlinux", f"{target}?offset={1024 * 1024}"]
    subprocess.run(add, check=True, capture_output=True)
    return target


def push(file: Path, name: str, *options: str | Path) -> dict[str, Any]:
    """Push a disk; returns what the command prints of it: ``image``, ``sent``, ..."""
    answer: dict[str, Any] = vmjobs("image", "push", "--json", *options, file, name).json
    return answer


def kernel_options(init: str) -> tuple[str | Path, ...]:
    """Options of `vmjobs image push` for a release's disk that User-mode Linux boots."""
    return ("--boot", "kernel", "--append", f"init=/usr/local/sbin/{init} quiet")


def submit(image: str, *options: str, count: int = 1) -> list[str]:
    """Submit jobs by the command line; returns their ids."""
    answer = vmjobs(
        "job", "submit", "--json", "--image", image, "--array", str(count), "--disk", "64", *options
    ).json
    return [job["id"] for job in answer["jobs"]]


def wait(*jobs: str) -> dict[str, Job]:
    """Wait until jobs have ended, in any final state."""
    done = vmjobs("job", "wait", "--json", "--timeout", "400", *jobs)
    assert done.code in {0, 1}, done.out + done.err
    return {found["id"]: Job.model_validate(found) for found in json.loads(done.out)}
