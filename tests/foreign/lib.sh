# What the recipes share; sourced. Nothing here needs a loop device or a mount of its own, so that
# the images can be made in a container as well.
# shellcheck shell=sh

mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

# bootstrap SUITE PACKAGES TREE HOOK: a minimal Debian in the directory TREE, then HOOK is run by
# whoever owns the tree (which in a user namespace is another one than outside).
bootstrap() {
    # shellcheck disable=SC2016 # mmdebstrap's $1, not ours
    mmdebstrap --quiet --variant=minbase --format=null ${2:+--include="$2"} \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
        --setup-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"' \
        --setup-hook='printf "MODULES=list\nCOMPRESS=lz4\n" >"$1/etc/initramfs-tools/conf.d/small"' \
        --setup-hook='printf "virtio_pci\nvirtio_blk\nxen_blkfront\next4\n" >"$1/usr/share/initramfs-tools/modules.d/vm"' \
        --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1/etc/hostname"' \
        --customize-hook='printf "nameserver 10.0.2.3\n" >"$1/etc/resolv.conf"' \
        --customize-hook="mkdir '$3' && tar -C \"\$1\" --one-file-system -c . | tar -C '$3' -xp" \
        --customize-hook="$4" \
        --customize-hook="rm -rf '$3'" \
        "$1" /dev/null "$mirror"
}

# file_system TREE FILE MIB OFFSET: an ext4 file system of MIB in FILE, OFFSET MiB from its start.
file_system() {
    truncate -s "$(($3 + $4 + 1))M" "$2"
    # The two features are newer than Debian's GRUB.
    mke2fs -q -F -t ext4 -O ^metadata_csum_seed,^orphan_file -E "offset=$(($4 * 1024 * 1024))" \
        -L root -d "$1" "$2" "$3M"
}

# grub_in_gap FILE: GRUB for a PC's firmware into the first sectors, which cat(1) can do as well:
# boot.img looks for the rest in sector 1, and the rest is all in one piece.
grub_in_gap() {
    grub-mkimage -O i386-pc -o "$1.core" -p '(hd0,msdos1)/boot/grub' \
        biosdisk part_msdos ext2 linux normal configfile serial terminal echo test
    dd if=/usr/lib/grub/i386-pc/boot.img of="$1" bs=1 count=440 conv=notrunc status=none
    dd if="$1.core" of="$1" bs=512 seek=1 conv=notrunc status=none
    rm "$1.core"
}
