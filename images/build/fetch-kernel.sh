#!/bin/sh
# Hook of mmdebstrap: fetch-kernel.sh PACKAGE ROOT. Downloads the .deb of the kernel that a Debian meta
# package depends on to ROOT/.kernel. It is not installed: no initramfs-tools, no boot loader.
set -eu
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG
export APT_CONFIG
real=$(apt-cache depends --important "$1" | sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
mkdir "$2/.kernel"
cd "$2/.kernel"
apt-get -q download "${real:-$1}"
