"""A guest for the contract tests: busybox, a shell script as init, and for QEMU a kernel.

The script does what the kernel parameter ``do=`` says, reports on the console and powers off.
The same script runs from a root disk (UML) and from an initial file system (kvm, qemu).
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
from pathlib import Path

from vmjobs.hypervisor.base import BootImage
from vmjobs.subprocess import run

#: The start of each init script.
BEGIN = r"""#!/bin/busybox sh
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
for again in 1 2 3; do  # in whatever order they need one another
    for module in /modules/*.ko; do [ -e "$module" ] && insmod "$module" 2>/dev/null; done
done
for device in /sys/bus/xen/devices/v[bi]*; do  # its driver finds it later
    [ ! -e $device ] || until [ -e $device/block ] || [ -e $device/net ]; do usleep 10000; done
done
"""
_INIT = (
    BEGIN
    + r"""
for word in $(cat /proc/cmdline); do
    case $word in do=*|targets=*|lines=*|within=*) eval "${word%%=*}=\${word#*=}" ;; esac
done
for disk in ubd xvd vd; do [ ! -e /dev/${disk}a ] || break; done
echo
echo "guest: up"

network() {
    for card in vec0 eth0; do [ -e /sys/class/net/$card ] && break; done
    ip link set lo up
    ip addr add 10.0.2.15/24 dev $card
    ip link set $card up
    ip route add default via 10.0.2.2
    echo nameserver 10.0.2.3 > /etc/resolv.conf
}

uptime_now() { cut -d ' ' -f 1 /proc/uptime; }

case $do in
hello) ;;
processors) echo "processors=$(nproc)" ;;
count) n=0; while :; do n=$((n + 1)); echo "count=$n"; usleep 50000; done ;;
spin) echo "spinning"; while :; do :; done ;;
unplugged) network; ip link set $card down; sleep 2 ;;
work)
    mount -t tmpfs tmp /tmp
    dd if=/dev/zero of=/tmp/fill bs=1M count=64 2>/dev/null
    echo "filled"
    # Many processes, each soon over: what they used is known to who waited for them alone.
    until [ $lines -eq 0 ]; do
        (n=0; while [ $n -lt 20000 ]; do n=$((n + 1)); done)
        lines=$((lines - 1))
    done
    echo "worked"
    ;;
panic) exec false ;;
reset) reboot -f ;;
flood) dmesg -n 1; seq 1 $lines | sed 's/$/ 0123456789012345678901234567890123456789/' ;;
disks)
    echo "root=$(head -c 9 /dev/${disk}a)"
    echo "scribbled" > /dev/${disk}a; sync
    echo "root=$(head -c 9 /dev/${disk}a)"
    echo "job=$(head -c 8 /dev/${disk}b)"
    if echo "guest" 2>/dev/null > /dev/${disk}b; then sync; fi
    dd if=/dev/zero of=/dev/${disk}c bs=1M count=4 2>/dev/null && echo "scratch=written"
    printf 'output of the guest' > /dev/${disk}d; sync
    echo "disks=$(ls /sys/block | grep -c ^$disk)"
    ;;
dhcp)
    printf '#!/bin/sh\n[ "$1" != bound ] || echo "bound=$ip via $router, $dns"\n' > /lease
    chmod +x /lease
    network
    ip addr flush dev $card
    udhcpc -i $card -n -q -f -s /lease
    ;;
network)
    network
    wget -q -O - http://10.0.2.100/small
    echo "sum=$(wget -q -O - http://10.0.2.100/large | md5sum)"
    head -c 1048576 /dev/zero | tr '\0' a > /tmp/body
    wget -q -O - --post-file /tmp/body http://10.0.2.100/upload
    ;;
pace)
    network
    head -c 2097152 /dev/zero | tr '\0' a > /tmp/body
    began=$(uptime_now)
    wget -q -O /dev/null http://10.0.2.100/large
    echo "down=$began-$(uptime_now)"
    began=$(uptime_now)
    wget -q -O /dev/null --post-file /tmp/body http://10.0.2.100/upload
    echo "up=$began-$(uptime_now)"
    ;;
write)
    echo writing
    dd if=/dev/zero of=/dev/${disk}b bs=1M count=8 conv=fsync 2>/dev/null
    echo written
    ;;
confined)
    network
    wget -q -O - http://10.0.2.100/small
    for target in $(echo $targets | tr , ' '); do
        { nc -w ${within:-2} ${target%:*} ${target#*:} < /dev/null && echo "reached=$target"; } &
    done
    wait
    nslookup example.org > /dev/null 2>&1 && echo "reached=dns"
    ;;
lan)
    address=${targets%,*} other=${targets#*,}
    for card in vec1 vec0; do [ -e /sys/class/net/$card ] && break; done
    ip link set lo up
    ip addr add $address/24 dev $card
    ip link set $card up
    until ping -c 1 -W 1 $other > /dev/null 2>&1; do :; done
    echo "met=$other through $card at $(cat /sys/class/net/$card/address)"
    head -c 1048576 /dev/zero | tr '\0' a > /tmp/body
    mkdir -p /tmp/www
    mv /tmp/body /tmp/www/body
    httpd -p 80 -h /tmp/www
    until wget -q -O /tmp/got http://$other/body; do sleep 1; done
    echo "got=$(md5sum < /tmp/got)"
    while :; do sleep 100; done
    ;;
door)
    network
    until answer=$(echo hello | nc -w 30 10.0.2.100 22) && [ "$answer" ]; do sleep 1; done
    echo "door=$answer"
    ;;
fill)
    free=$(awk '/^MemAvailable/ { print int($2 / 1024) - 24 }' /proc/meminfo)
    mount -t tmpfs -o size=${free}m none /mnt
    seq 1 100000000 | head -c ${free}m > /mnt/all
    echo "sum=$(head -c ${free}m /mnt/all | md5sum)"
    echo "again=$(seq 1 100000000 | head -c ${free}m | md5sum)"
    ;;
hostfs) mount -t hostfs none /mnt 2>&1 && ls /mnt && echo "mounted" ;;
esac
echo "guest: done"
poweroff -f
"""
)

#: Drivers of a distribution's kernel that the guest needs, in the order of loading.
_MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "virtio_blk",
    "failover",
    "net_failover",
    "virtio_net",
    "xen-blkfront",
    "xen-netfront",
)


def busybox() -> Path:
    found = shutil.which("busybox")
    assert found, "busybox-static is not installed"
    return Path(found)


def _tree(directory: Path, script: str = _INIT) -> Path:
    root = directory / "root"
    for name in ("bin", "dev", "proc", "sys", "tmp", "mnt", "etc", "modules"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox(), root / "bin" / "busybox")
    init = root / "init"
    init.write_text(script)
    init.chmod(0o755)
    return root


def root_disk_guest(directory: Path, script: str = _INIT, *programs: Path) -> BootImage:
    """A guest on a root disk, which UML boots. script: its init. programs: in its /bin."""
    disk = directory / "root.img"
    tree = _tree(directory, script)
    for program in programs:
        shutil.copy(program, tree / "bin")
    run(["mke2fs", "-q", "-t", "ext4", "-d", tree, disk, "32M"], timeout=300)
    return BootImage(digest="", root=disk, cmdline=("init=/init",))


def direct_boot_guest(directory: Path, kernel_tree: Path, script: str = _INIT) -> BootImage:
    """A guest in an initial file system, which kvm and qemu boot. script: its init."""
    tree = _tree(directory, script)
    for number, name in enumerate(_MODULES):
        for module in (kernel_tree / "lib" / "modules").rglob(f"{name}.ko*"):
            data = module.read_bytes()
            plain = lzma.decompress(data) if module.suffix == ".xz" else data
            (tree / "modules" / f"{number}-{name}.ko").write_bytes(plain)
    names = "".join(f"{path.relative_to(tree)}\n" for path in sorted(tree.rglob("*")))
    pack = ["cpio", "-o", "-H", "newc", "--quiet"]
    initrd = directory / "initrd"
    initrd.write_bytes(subprocess.check_output(pack, cwd=tree, input=names.encode(), timeout=300))
    disk = directory / "root.img"
    disk.write_bytes(b"base disk".ljust(1 << 20, b"\0"))
    kernel = sorted((kernel_tree / "boot").glob("vmlinuz-*"))[-1]
    return BootImage(digest="", root=disk, kernel=kernel, initrd=initrd)


def kernel_tree() -> Path:
    """A directory with ``boot/`` and ``lib/modules/`` of one kernel, which is downloaded once."""
    if given := os.environ.get("VMJOBS_TEST_KERNEL"):
        return Path(given)
    if list(Path("/boot").glob("vmlinuz-*")) and Path("/lib/modules").is_dir():
        return Path("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmjobs-tests" / "kernel"
    if not (cache / "boot").is_dir():
        _fetch_kernel(cache)
    return cache


def _fetch_kernel(cache: Path) -> None:
    scratch = cache.with_name(f"kernel-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    depends = run(["apt-cache", "depends", "linux-image-cloud-amd64"], timeout=300).text
    package = next(
        line.split()[-1] for line in depends.splitlines() if line.strip().startswith("Depends:")
    )
    subprocess.run(["apt-get", "download", package], timeout=300, cwd=scratch, check=True)
    archive = next(scratch.glob("*.deb"))
    run(["dpkg-deb", "-x", archive, scratch], timeout=300)
    archive.unlink()
    try:
        scratch.rename(cache)
    except OSError:  # another worker was faster
        shutil.rmtree(scratch)
