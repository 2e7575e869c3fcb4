#!/bin/sh
# The userland of some Debian release as a plain file system, to be booted by a kernel that is kept
# beside it: release.sh HERE PART SUITE. Its init ends as its name says.
set -eu
here=$1 part=$2 suite=$3
# shellcheck source=tests/foreign/lib.sh
. "$here/lib.sh"

if [ "${4:-}" != disk ]; then
    bootstrap "$suite" "" "$part.tree" "sh '$here/release.sh' '$here' '$part' '$suite' disk"
    exit
fi

tree=$part.tree
install -m 755 "$here/guest/muons" "$tree/usr/local/sbin"
for how in poweroff reset panic hang; do
    install -m 755 "$here/guest/odd-init" "$tree/usr/local/sbin/odd-$how"
done
install -d "$tree/opt/muons"
install -m 644 "$here/guest/muons.conf" "$tree/opt/muons"
truncate -s 300M "$part.img"
mke2fs -q -F -t ext4 -O ^metadata_csum_seed,^orphan_file -L root -d "$tree" "$part.img"
