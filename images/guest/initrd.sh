#!/bin/sh
# The first process on kvm, xen and qemu: loads the modules that the root disk needs, mounts it and executes
# the image's own init. Tools are called as busybox applets: there are no links.
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev

root=/dev/vda init=/sbin/init flags=
mode=ro
read -r cmdline </proc/cmdline
for word in $cmdline; do
    case $word in
    root=*) root=${word#root=} ;;
    init=*) init=${word#init=} ;;
    rootflags=*) flags=,${word#rootflags=} ;;
    ro | rw) mode=$word ;;
    esac
done

while read -r module; do
    $bb insmod "/modules/$module.ko"
done </modules/order

# connected: whether Xen's disks and card are there; their drivers find them one after the other.
connected() {
    for device in /sys/bus/xen/devices/vbd-* /sys/bus/xen/devices/vif-*; do
        [ ! -e "$device" ] || [ -e "$device/block" ] || [ -e "$device/net" ] || return 1
    done
}

tries=0
while [ ! -b "$root" ] || ! connected; do
    tries=$((tries + 1))
    if [ "$tries" -gt 200 ]; then
        echo "vmjobs: error: there is no root disk $root, or a device of Xen's is missing" >/dev/console
        $bb poweroff -f
    fi
    $bb usleep 50000 # a driver may still be looking for its hardware
done

if ! $bb mount -t ext4 -o "$mode$flags" "$root" /root; then
    echo "vmjobs: error: cannot mount the root disk $root" >/dev/console
    $bb poweroff -f
fi
$bb mount --move /dev /root/dev
$bb mount --move /sys /root/sys
$bb mount --move /proc /root/proc
exec $bb switch_root /root "$init"
