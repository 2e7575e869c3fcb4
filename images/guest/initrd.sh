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

# connected: whether all disks and cards are there of Xen and s390x, whose drivers find them one after the other.
connected() {
    for device in /sys/bus/xen/devices/vbd-* /sys/bus/xen/devices/vif-*; do
        [ ! -e "$device" ] || [ -e "$device/block" ] || [ -e "$device/net" ] || return 1
    done
    for device in /sys/bus/ccw/devices/*/virtio*; do
        [ -e "$device" ] || [ ! -e "${device%/*}" ] || return 1
        [ ! -e "$device" ] || read -r kind <"$device/device"
        case ${kind:-} in
        0x0001) [ -e "$device/net" ] || return 1 ;;
        0x0002) [ -e "$device/block" ] || return 1 ;;
        esac
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

# s390x finds disks in any order: their nodes get the order of their addresses, which is that of the VM's disks.
set -- a b c d e f g h i j k l m n o p
for disk in /sys/bus/ccw/devices/*/virtio*/block/*; do
    [ -e "$disk" ] || continue
    IFS=: read -r major minor <"$disk/dev"
    $bb rm -f "/dev/vd$1"
    $bb mknod "/dev/vd$1" b "$major" "$minor"
    shift
done

if ! $bb mount -t ext4 -o "$mode$flags" "$root" /root; then
    echo "vmjobs: error: cannot mount the root disk $root" >/dev/console
    $bb poweroff -f
fi
$bb mount --move /dev /root/dev
$bb mount --move /sys /root/sys
$bb mount --move /proc /root/proc
exec $bb switch_root /root "$init"
