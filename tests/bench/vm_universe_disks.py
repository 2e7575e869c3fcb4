"""Runs on an execute node: lays out one guest for HTCondor's VM universe, ready to boot.

Usage: ``vm_universe_disks.py DIGEST DIRECTORY SCRIPT MEMORY``; prints kernel, initial file system
and kernel parameters. HTCondor's VM universe makes no overlay, so the root disk is a copy, made here
beforehand.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from raw_boot import lay_disks

from images.store import ImageStore
from vmjobs.hypervisor.domain_xml import board, kernel_parameters
from vmjobs.model import JobSpec, NetworkMode

STORE = Path("/var/lib/vmjobs/agent/images")


def main() -> None:
    """Prepare and print."""
    digest, where, script, memory = sys.argv[1:]
    directory = Path(where)
    directory.mkdir(parents=True)
    image = ImageStore(STORE).prepare(digest)
    spec = JobSpec(
        image=digest,
        script=script,
        memory=int(memory),
        disk=64,
        network=NetworkMode.NONE,
        run_seconds=60,
    )
    lay_disks(directory, spec, digest)
    subprocess.run(["cp", "--sparse=always", str(image.root), str(directory / "root.disk")], check=True)
    for name, part in (("kernel", image.kernel), ("initrd", image.initrd)):
        shutil.copyfile(str(part), directory / name)
    for path in directory.iterdir():
        shutil.chown(path, "vmjobs", "vmjobs")
    words = kernel_parameters(image, board())
    print(directory / "kernel", directory / "initrd", " ".join(words), sep="\n")  # noqa: T201


main()
