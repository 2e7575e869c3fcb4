#!/bin/sh
# A UEFI disk by mkosi: GPT, systemd-boot, a unified kernel image, Debian 12 with systemd, of which one
# unit computes and leaves the machine off: uefi.sh HERE PART.
#
# Debian 12's own mkosi mounts the disk's EFI partition, for which the host's kernel has to know FAT. The
# one of Debian 13 writes it by mtools; it runs here with Debian 13's tools.
set -eu
here=$1 part=$2
# shellcheck source=tests/foreign/lib.sh
. "$here/lib.sh"
work=$part.d
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/tools" "$work/python" "$work/initrd"
mmdebstrap --quiet --variant=apt --include=mkosi --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' trixie "$work/tools.tar" "$mirror"
tar -C "$work/tools" --no-same-owner --exclude='./dev/*' -xf "$work/tools.tar"
ln -s "$work/tools/usr/lib/python3/dist-packages/mkosi" "$work/python/mkosi"

# mkosi's own initial RAM disk is all of systemd once more; this one finds the disk. mkosi adds modules.
for folder in bin dev proc sys root usr/lib; do mkdir -p "$work/initrd/$folder"; done
cp /bin/busybox "$work/initrd/bin"
ln -s usr/lib "$work/initrd/lib"
install -m 755 "$here/guest/uefi-initrd" "$work/initrd/init"
(cd "$work/initrd" && find . | cpio --quiet -o -H newc -R 0:0 >"$work/initrd.cpio")

os=$work/os
extra=$os/mkosi.extra
install -D -m 644 "$here/guest/mkosi.conf" "$os/mkosi.conf"
install -D -m 755 "$here/guest/muons" "$extra/usr/local/sbin/muons"
install -D -m 644 "$here/guest/muons.conf" "$extra/opt/muons/muons.conf"
install -D -m 644 "$here/guest/muons.service" "$extra/etc/systemd/system/muons.service"
mkdir -p "$extra/etc/systemd/system/multi-user.target.wants" "$os/mkosi.sandbox/etc/apt/sources.list.d"
ln -s ../muons.service "$extra/etc/systemd/system/multi-user.target.wants/muons.service"
cat >"$os/mkosi.sandbox/etc/apt/sources.list.d/mkosi.sources" <<END
Types: deb
URIs: $mirror
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
cd "$os"
PYTHONPATH=$work/python python3 -m mkosi --tools-tree "$work/tools" --initrd "$work/initrd.cpio" \
    --workspace-directory "$work" --output-directory "$work" --package-cache-dir "$work/cache" build
mv "$work/uefi.raw" "$part.img"
