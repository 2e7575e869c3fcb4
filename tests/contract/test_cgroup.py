"""Real cgroup v2, independent of this host's: on a UML kernel that sees this host's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit import KIT, ROOT
from vmjobs.hypervisor.uml.kernel_boot import OWN_KERNEL

SECONDS = 300.0
_INIT = """#!/bin/sh
export PATH=/usr/bin:/bin:/usr/sbin:/sbin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={root}
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /mnt
mount -t cgroup2 cgroup /sys/fs/cgroup
echo "+cpu +io +memory +pids" > /sys/fs/cgroup/cgroup.subtree_control
mkdir -p /sys/fs/cgroup/agent.service/agent /mnt/disk
mknod /mnt/ubda b 98 0
mount -t ext4 /mnt/ubda /mnt/disk
echo $$ > /sys/fs/cgroup/agent.service/agent/cgroup.procs
{python} {body} 2>&1
echo o > /proc/sysrq-trigger
while :; do wait; done
"""


def test_a_delegated_group_holds_vms(tmp_path: Path) -> None:
    disk, init = tmp_path / "disk", tmp_path / "init"
    with disk.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", disk], check=True)
    init.write_text(_INIT.format(root=ROOT, python=sys.executable, body=KIT / "cgroup_body.py"))
    init.chmod(0o755)
    assert OWN_KERNEL.exists(), "make kernel"
    # Read-only: this host's files do not change; /mnt and what is below it are the guest's.
    words = ["rootfstype=hostfs", "rootflags=/", "ro", f"init={init}", f"ubd0={disk}", "mem=256M"]
    told = subprocess.run(
        [OWN_KERNEL, *words, "con=null", "con0=null,fd:1", "noreboot", "panic=1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    ).stdout.decode("utf-8", "replace")
    said = dict(line.strip().partition(": ")[::2] for line in told.splitlines())
    assert said.get("done") == "all of it", told
    assert said["before"] == "None", "a group that nobody delegated was taken"
    assert said["not apart"] == "None", "a group was taken that this process's successor is to start in"
    assert said["unenforced"] == "()"
    assert 0.15 < float(said["share"]) < 0.6, "0.3 of one processor, of which it would take all"
    assert said["weight"] == "50"
    assert 1.5 < float(said["writing"]) < 60, "4 MiB at 2 MiB a second"
    assert int(said["memory.max"]) == (2 * 64 + 2048) << 20
    assert (said["pids.max"], said["pids.current"]) == (str(64 * 8 + 512), "1")
    assert said["cpu.max"] == "200000 100000"
    assert said["groups"] == "agent"
