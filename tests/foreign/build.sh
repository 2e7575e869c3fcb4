#!/bin/sh
# Bootable images that no part of vmjobs makes, by Debian's own tools: build.sh NAME...
#
#   bios      MBR, GRUB, Debian 12; computes and powers off   (bios.vmlinuz, bios.initrd: its kernel)
#   uefi      GPT, systemd-boot, Debian 12 with systemd, by mkosi; the same
#   cloud     MBR, GRUB, Debian 12 with Debian's cloud-init; waits for NoCloud data
#   bullseye  Debian 11 as a plain file system, without a kernel
#   trixie    Debian 13 as a plain file system, without a kernel
#
# Prints their paths, build/foreign/NAME.img. One that was made by the same recipe is taken as it is.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
store=$(cd "$here/../.." && pwd)/build/foreign
mkdir -p "$store"

# A recipe names the files that it puts into the guest as guest/FILE.
key_of() (
    cd "$here"
    # shellcheck disable=SC2046 # a list of names
    cat "$1" lib.sh $(grep -o 'guest/[a-z.-]*' "$1" | sort -u) | sha256sum | cut -c 1-64
)

for name; do
    case $name in
        bios | uefi | cloud) recipe=$here/$name.sh ;;
        bullseye | trixie) recipe=$here/release.sh ;;
        *) echo "build.sh: there is no recipe $name" >&2; exit 64 ;;
    esac
    # Several test processes may want the same image at once.
    exec 9>"$store/$name.lock"
    flock 9
    key=$(key_of "$recipe")
    if [ ! -f "$store/$name.img" ] || [ "$(cat "$store/$name.key" 2>/dev/null)" != "$key" ]; then
        rm -rf "$store/$name.key" "$store/$name".part.*
        began=$(date +%s)
        echo "building the image $name with Debian's tools" >&2
        sh "$recipe" "$here" "$store/$name.part" "$name" >"$store/$name.log" 2>&1 ||
            { tail -n 40 "$store/$name.log" >&2; echo "build.sh: $name failed; see $store/$name.log" >&2; exit 70; }
        for part in "$store/$name".part.*; do
            mv "$part" "$store/$name.${part##*.part.}"
        done
        echo "$key" >"$store/$name.key"
        echo "built $name in $(($(date +%s) - began)) s" >&2
    fi
    exec 9>&-
    echo "$store/$name.img"
done
