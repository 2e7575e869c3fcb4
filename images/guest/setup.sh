# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# Sets up the guest, from a bare kernel to a job that can start.

# mounts_left: sets $table to the missing mounts, as an fstab.
mounts_left() {
    places=' '
    while read -r _ place _; do
        places="$places$place "
    done </proc/mounts
    table=
    for entry in sysfs:/sys:defaults devpts:/dev/pts:gid=5,mode=620 tmpfs:/dev/shm:mode=1777 \
        ${memory:-tmpfs:/run:mode=755 tmpfs:/tmp:mode=1777}; do
        place=${entry#*:} place=${place%:*}
        case $places in *" $place "*) continue ;; esac
        table="$table${entry%%:*} $place ${entry%%:*} ${entry##*:} 0 0$newline"
    done
}

setup_mounts() {
    # A shell with tools of its own finds them by /proc.
    [ -r /proc/mounts ] || "$busybox" mount -t proc proc /proc || mount -t proc proc /proc
    if [ ! -c /dev/null ] && ! bb mount -t devtmpfs -o mode=755 devtmpfs /dev; then
        bb mount -t tmpfs -o mode=755 tmpfs /dev
        bb mount -t sysfs sysfs /sys
        bb mdev -s
    fi
    # devtmpfs lacks /dev/fd, which shells need for <(...), and similar links; also mount points.
    [ -e /dev/fd ] || bb cp -a "$lib/dev/." /dev
    mounts_left
    [ -z "$table" ] || bb mount -a -T /proc/self/fd/0 <<EOF
$table
EOF
    [ -w / ] || bb mount -o remount,rw /
    bb mkdir -m 0700 "$run" "$run/job"
    echo 1 >/proc/sys/kernel/printk # the console is for the job; a panic is still shown
    echo 0 >/proc/sys/kernel/ctrl-alt-del # Ctrl-Alt-Del asks process 1 and does not reboot
    echo "$oom_spared" >/proc/self/oom_score_adj
}

# find_disks: finds job disk, scratch disk and output disk, which follow the root disk in this order.
find_disks() {
    for prefix in vd ubd xvd sd; do
        if [ -b "/dev/${prefix}b" ]; then
            # shellcheck disable=SC2034 # output_disk: collect.sh
            job_disk=/dev/${prefix}b scratch_disk=/dev/${prefix}c output_disk=/dev/${prefix}d
            return 0
        fi
    done
    fail 'there is no job disk'
}

read_job_disk() {
    "$lib/unpack" description "$job_disk" "$run/job" 2>"$run/unpack.log" ||
        fail "cannot read the job disk: $(cat "$run/unpack.log")"
    # shellcheck disable=SC1091 # made by the host, every value quoted
    . "$run/job/job.env"
    [ "$VMJOBS_CONTRACT" = 3 ] ||
        fail "the host uses version $VMJOBS_CONTRACT of the guest contract (expected 3)"
    echo "vmjob-${VMJOBS_ARRAY_INDEX:-0}" >/proc/sys/kernel/hostname
    [ -z "${VMJOBS_CHECKPOINT:-}" ] || keep_token "$VMJOBS_TOKEN"
}

# keep_token TOKEN: stores it for all later requests of all processes.
keep_token() {
    fresh=$run/token.${http_slot:-first} # several processes may do this at once
    (umask 077 && echo "$1" >"$fresh") && mv "$fresh" "$run/token"
}

# set_clock EPOCH SECONDS: sets the clock to the host's if it differs by more than SECONDS.
set_clock() {
    case $1 in '' | *[!0-9]*) return 0 ;; esac
    # shellcheck disable=SC3028 # some shells have the variable
    now=${EPOCHSECONDS:-$(bb date +%s)}
    if [ $((now - $1)) -gt "$2" ] || [ $(($1 - now)) -gt "$2" ]; then
        bb date -s "@$1" >/dev/null
    fi
}

# keep_scratch: mounts the scratch disk of an earlier VM; removes only its script's files. The host has
# made the file system: a damaged disk is repaired as far as that is safe, and never formatted.
keep_scratch() {
    if command -v e2fsck >/dev/null; then
        e2fsck -p "$scratch_disk" >"$run/e2fsck.log" 2>&1
        [ $? -le 3 ] || keep_damaged "$(cat "$run/e2fsck.log")"
    fi
    bb mount -t ext4 -o noatime "$scratch_disk" "$job" 2>"$run/e2fsck.log" ||
        keep_damaged "$(cat "$run/e2fsck.log")"
    # The host may have enlarged the disk. This never makes a file system smaller.
    ! command -v resize2fs >/dev/null || resize2fs "$scratch_disk" >"$run/resize2fs.log" 2>&1 ||
        echo "vmjobs: cannot enlarge the kept file system: $(tail -n 1 "$run/resize2fs.log")"
    cd "$job" && rm -rf script "$work" home tmp && cd /
}

# keep_damaged WHY: leaves the disk unchanged, for an operator to repair.
keep_damaged() {
    fail "the kept disk cannot be mounted and is left unchanged: repair it on its node with e2fsck," \
        "or restore it from a backup ($(echo "$1" | tr '\n' ' '))"
}

# make_file_system: for hosts that have not made one, or whose file system is too new for this kernel.
make_file_system() {
    # The disk lives only as long as the job: no journal. Inode tables are initialized later.
    if ! mke2fs -q -F -t ext4 -m 0 -O ^has_journal -E lazy_itable_init=1,nodiscard \
        "$scratch_disk" >"$run/mke2fs.log" 2>&1; then
        bb mke2fs -F -m 0 "$scratch_disk" >"$run/mke2fs.log" 2>&1 ||
            fail "cannot make a file system on the scratch disk: $(cat "$run/mke2fs.log")"
    fi
}

mount_scratch() {
    bb mount -t ext4 -o noatime "$scratch_disk" "$job"
}

make_scratch() {
    [ -b "$scratch_disk" ] || fail 'there is no scratch disk'
    [ -d "$job" ] || mkdir -p "$job"
    if [ "${VMJOBS_KEEP:-}" ]; then
        keep_scratch
    else
        if [ -z "${VMJOBS_FORMATTED:-}" ] || ! mount_scratch 2>/dev/null; then
            make_file_system
            mount_scratch || fail 'cannot mount the scratch disk'
        fi
    fi
}

# unpack_job: unpacks the script, and the inputs to its directory, all writable.
unpack_job() {
    "$lib/unpack" files "$job_disk" "$job" 2>"$run/unpack.log" ||
        fail "cannot unpack the job: $(cat "$run/unpack.log")"
    [ -z "$container" ] || spread_scratch
    if [ ! -s "$job/script" ]; then
        [ -n "$container" ] || fail 'the job has no script'
        # shellcheck disable=SC2034 # script.sh
        what=program
        take_program
        return
    fi
    [ -z "$container" ] || own_job
}

# first_interface: sets $interface to the first hardware interface; false if there is none.
first_interface() {
    for path in /sys/class/net/eth* /sys/class/net/vec* /sys/class/net/en* /sys/class/net/*; do
        interface=${path##*/}
        case $interface in
        '*' | 'eth*' | 'vec*' | 'en*' | lo | sit* | tunl* | ip6* | gre* | erspan* | dummy* | bond*) ;;
        *) return 0 ;;
        esac
    done
    return 1
}

# start_loopback: brings up lo, which scripts need even without a network.
start_loopback() {
    bb ifconfig lo 127.0.0.1 up || ip link set lo up
}

start_network() {
    tries=0
    until first_interface; do
        tries=$((tries + 1))
        [ "$tries" -le 50 ] || fail 'there is no network interface'
        pause 0.1 # a driver may still be looking for its hardware
    done
    if ! bb ifconfig "$interface" 10.0.2.15 netmask 255.255.255.0 up; then
        ip address add 10.0.2.15/24 dev "$interface"
        ip link set "$interface" up || fail "cannot set up $interface"
    fi
    if [ "$VMJOBS_NETWORK" = outbound ]; then
        bb ip route add default via 10.0.2.2 || bb route add default gw 10.0.2.2
        bb rm -f /etc/resolv.conf
        echo 'nameserver 10.0.2.3' >/etc/resolv.conf
    fi
}
