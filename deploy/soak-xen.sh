#!/bin/sh
# Tests of hypervisor drivers on Xen: soak-xen.sh [PYTEST ARGUMENT...]. Without arguments: all that a Xen host can run.
#
# Xen and its host system (dom0, Debian 12) run in QEMU with emulated processors, so no hardware support is needed and
# this machine stays as it is. The system has no network, sees this directory read-only, and is discarded at the end.
# It boots in about a minute on an idle machine; results are in build/xen.
set -eu
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "soak-xen.sh: run it as root: it makes the disk of a system" >&2; exit 2; }
[ $# -gt 0 ] || set -- tests/contract/test_hypervisor.py tests/contract/test_hypervisor_guest.py \
    tests/contract/test_xen.py -k xen

recipe=$(cat "$0" deploy/xen/dom0-start | sha256sum)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vmjobs/dom0
system=$cache/${recipe%% *}
if [ ! -d "$system" ]; then
    echo "building the Xen host (some minutes)"
    mkdir -p "$cache"
    made=$(mktemp -d -p "$cache" .new.XXXXXX)
    trap 'rm -rf "$made"' EXIT
    mmdebstrap --quiet --variant=minbase --format=directory \
        --include=systemd-sysv,udev,kmod,iproute2,nftables,procps,e2fsprogs,util-linux-extra,busybox-static,cpio,zstd \
        --include=xen-system-amd64,qemu-system-xen,qemu-utils,linux-image-amd64 \
        --include=libvirt-daemon,libvirt-daemon-system,libvirt-daemon-driver-xen,libvirt-clients,python3-libvirt \
        --include=python3,libpq5,bubblewrap,slirp4netns bookworm "$made/root"
    root=$made/root
    echo 'XENCONSOLED_ARGS="--log=guest"' >>"$root/etc/default/xen"
    echo '/dev/vda / ext4 defaults 0 1' >"$root/etc/fstab"
    echo dom0 >"$root/etc/hostname"
    install -m 0755 deploy/xen/dom0-start "$root/usr/local/sbin/"
    install -d "$root/var/log/xen/console"
    cat >"$root/etc/systemd/system/dom0-start.service" <<EOF
[Unit]
After=xen.service
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/dom0-start
ExecStopPost=/bin/systemctl poweroff --no-block
StandardOutput=tty
StandardError=tty
TTYPath=/dev/hvc0
EOF
    mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
    ln -s ../dom0-start.service "$root/etc/systemd/system/multi-user.target.wants/"
    for unit in apt-daily.timer apt-daily-upgrade.timer serial-getty@hvc0.service getty@tty1.service; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit"
    done
    gunzip -c "$root"/boot/xen-*-amd64.gz >"$made/xen"
    cp "$root"/boot/vmlinuz-* "$made/kernel"
    cp "$root"/boot/initrd.img-* "$made/initrd"
    mke2fs -q -t ext4 -d "$root" "$made/disk" 6G
    rm -rf "$root"
    mv -T "$made" "$system"
    trap - EXIT
fi

rm -rf build/xen
mkdir -p build/xen
printf '%s\n' "$@" >build/xen/arguments
# cpu: newer models crash dom0 at once. dom0_mem: the rest is for VMs. sched: libvirt limits VMs with no other.
qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu Nehalem -smp 2 -m 3G -display none -monitor none -no-reboot \
    -kernel "$system/xen" \
    -append "dom0_mem=1200M,max:1200M com1=115200,8n1 console=com1 loglvl=error sched=credit" \
    -initrd "$system/kernel root=/dev/vda rw console=hvc0 quiet vmjobs=$PWD,$system/initrd" \
    -drive "file=$system/disk,format=raw,if=virtio,cache=unsafe,snapshot=on" \
    -virtfs "local,path=$PWD,mount_tag=clone,security_model=none,readonly=on" \
    -virtfs "local,path=$PWD/build/xen,mount_tag=results,security_model=none" \
    -nic none -serial stdio </dev/null | tee build/xen/console
exit "$(cat build/xen/status 2>/dev/null || echo 3)"
