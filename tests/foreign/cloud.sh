#!/bin/sh
# A disk with an MBR, GRUB, Debian 12, systemd and Debian's cloud-init, as it comes: nothing in it was
# set up but the console, and that NoCloud is where its data is: cloud.sh HERE PART.
set -eu
here=$1 part=$2
# shellcheck source=tests/foreign/lib.sh
. "$here/lib.sh"

if [ "${4:-}" != disk ]; then
    bootstrap bookworm linux-image-cloud-amd64,systemd-sysv,udev,cloud-init,dbus,ifupdown,isc-dhcp-client,iproute2,netbase,busybox-static \
        "$part.tree" "sh '$here/cloud.sh' '$here' '$part' - disk"
    exit
fi

tree=$part.tree
install -d "$tree/boot/grub"
echo 'datasource_list: [NoCloud, None]' >"$tree/etc/cloud/cloud.cfg.d/90_dpkg.cfg"
echo 'LABEL=root / ext4 errors=remount-ro 0 1' >"$tree/etc/fstab"
cat >"$tree/boot/grub/grub.cfg" <<'END'
serial --unit=0 --speed=115200
terminal_input serial
terminal_output serial
linux /vmlinuz root=/dev/vda1 ro console=ttyS0 panic=-1
initrd /initrd.img
boot
END
file_system "$tree" "$part.img" 700 1
echo 'start=1MiB, size=700MiB, type=83, bootable' | sfdisk -q --no-reread --no-tell-kernel "$part.img"
grub_in_gap "$part.img"
