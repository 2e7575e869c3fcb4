#!/bin/sh
# Sets up a bare Debian 12: installs missing packages, and makes a virtual environment, again whenever its
# requirements have changed. Prints nothing if there is nothing to do.
#   setup.sh architectures    also what builds and runs images for other architectures
set -eu
cd "$(dirname "$0")/.."

packages="
    ca-certificates curl gcc git libc6-dev make musl-tools bc bison flex lz4 xz-utils python3 python3-venv python3-dev python3-libvirt
    docker.io docker-compose iproute2
    user-mode-linux slirp4netns nftables qemu-system-x86 qemu-utils
    libvirt-daemon libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients
    mmdebstrap uidmap debian-archive-keyring e2fsprogs busybox-static zstd
    postgresql rabbitmq-server shellcheck
    bubblewrap ovmf skopeo docker-registry golang-go nbdkit nbdkit-plugin-python
    grub-pc-bin cpio fdisk dosfstools openssh-client squid krb5-kdc krb5-admin-server"
[ "${1:-}" != architectures ] || packages="$packages
    arch-test binfmt-support qemu-user-static qemu-system-arm qemu-system-misc
    gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-s390x-linux-gnu libc6-dev-s390x-cross"

root=
[ "$(id -u)" = 0 ] || root=sudo
missing=
for package in $packages; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
        missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "installing$missing"
    $root apt-get update -qq
    # RUNLEVEL=1: packages must not start their servers, which tests start themselves.
    # shellcheck disable=SC2086 # a list of words
    $root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -qq -y --no-install-recommends $missing >/dev/null
fi

# As udev makes it, any user may open it: a tap device itself needs rights over a network namespace.
if [ "$(stat -c %a /dev/net/tun 2>/dev/null)" != 666 ]; then
    $root mkdir -p /dev/net
    [ -c /dev/net/tun ] || $root modprobe tun 2>/dev/null || $root mknod /dev/net/tun c 10 200
    $root chmod 0666 /dev/net/tun
fi

guest=images/guest
# compile COMPILER SUFFIX: compiles the guest's programs.
compile() {
    for program in $guest/talk $guest/unpack; do
        if [ ! -x "$program$2" ] || [ -n "$(find "$program.c" -newer "$program$2")" ]; then
            "$1" -std=gnu17 -Os -Wall -Wextra -Werror -static -s -o "$program$2" "$program.c"
        fi
    done
}
compile musl-gcc ''
if [ "${1:-}" = architectures ]; then
    [ -e /proc/sys/fs/binfmt_misc/register ] ||
        $root mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    for architecture in aarch64 s390x; do
        compile $architecture-linux-gnu-gcc -$architecture
        [ -e /proc/sys/fs/binfmt_misc/qemu-$architecture ] ||
            $root update-binfmts --enable qemu-$architecture
    done
fi

stamp=.venv/.made-from
want=$(cat setup.cfg pyproject.toml deploy/requirements.txt | sha256sum)
if [ ! -x .venv/bin/vmjobs ] || [ "$(cat $stamp 2>/dev/null)" != "$want" ]; then
    echo "making .venv"
    # Debian's own Python, because python3-libvirt is built for it. Debian's other modules must not be mixed with
    # newer ones, so all others are installed here, in the releases that deploy/lock.sh determined.
    /usr/bin/python3 -m venv --system-site-packages .venv
    pip=".venv/bin/pip install --quiet --disable-pip-version-check"
    $pip --ignore-installed --require-hashes --only-binary :all: --requirement deploy/requirements.txt
    $pip --no-deps --no-build-isolation --editable .
    echo "$want" >$stamp
fi
