#!/bin/sh
# A disk with an MBR, GRUB and Debian 12, which computes something and powers off: bios.sh HERE PART.
# Its init is a shell script of its own; there is neither a network nor any of vmjobs in it.
set -eu
here=$1 part=$2
# shellcheck source=tests/foreign/lib.sh
. "$here/lib.sh"

if [ "${4:-}" != disk ]; then
    bootstrap bookworm linux-image-cloud-amd64 "$part.tree" "sh '$here/bios.sh' '$here' '$part' - disk"
    exit
fi

tree=$part.tree
install -m 755 "$here/guest/muons" "$here/guest/muons-init" "$tree/usr/local/sbin"
install -d "$tree/opt/muons" "$tree/boot/grub"
install -m 644 "$here/guest/muons.conf" "$tree/opt/muons"
cat >"$tree/boot/grub/grub.cfg" <<'END'
serial --unit=0 --speed=115200
terminal_input serial
terminal_output serial
echo "GRUB: starting Debian"
set system="/vmlinuz root=/dev/vda1 console=ttyS0"
if [ "$grub_platform" = xen ]; then set system="/vmlinux root=/dev/xvda1 console=hvc0"; fi
linux $system ro quiet panic=-1 init=/usr/local/sbin/muons-init
initrd /initrd.img
boot
END
cp "$tree/vmlinuz" "$part.vmlinuz" # for images that bring none
cp "$tree/initrd.img" "$part.initrd"
file_system "$tree" "$part.img" 400 1
echo 'start=1MiB, size=400MiB, type=83, bootable' | sfdisk -q --no-reread --no-tell-kernel "$part.img"
grub_in_gap "$part.img"
