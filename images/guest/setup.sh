# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# From a bare kernel to a job that could start.

# mounted DIRECTORY: true if something is mounted there.
mounted() {
    while read -r _ place _; do
        [ "$place" != "$1" ] || return 0
    done </proc/mounts
    return 1
}

# mount_on TYPE DIRECTORY [OPTIONS]: unless it is mounted already.
mount_on() {
    mounted "$2" && return 0
    [ -d "$2" ] || mkdir -p "$2"
    bb mount -t "$1" -o "${3:-defaults}" "$1" "$2"
}

setup_mounts() {
    [ -r /proc/mounts ] || bb mount -t proc proc /proc
    mount_on sysfs /sys
    if ! mount_on devtmpfs /dev mode=755 2>/dev/null; then
        mount_on tmpfs /dev mode=755
        bb mdev -s
    fi
    mount_on devpts /dev/pts gid=5,mode=620
    mount_on tmpfs /dev/shm mode=1777
    mount_on tmpfs /run mode=755
    mount_on tmpfs /tmp mode=1777
    # devtmpfs has no /dev/fd; shells need it for <(...).
    [ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
    for name in stdin:0 stdout:1 stderr:2; do
        [ -e "/dev/${name%:*}" ] || ln -s "/proc/self/fd/${name#*:}" "/dev/${name%:*}"
    done
    mkdir -p "$run"
    chmod 0700 "$run"
    bb mount -o remount,rw / 2>/dev/null || :
    bb dmesg -n 1 # the console is for the job; a panic is still shown
    echo 0 >/proc/sys/kernel/ctrl-alt-del # Ctrl-Alt-Del asks process 1 and does not reboot
    echo "$oom_spared" >/proc/self/oom_score_adj
    bb ip link set lo up 2>/dev/null || bb ifconfig lo 127.0.0.1 up
}

# find_disks: after the root disk come job disk, scratch disk and output disk, in this order.
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
    mkdir -p "$run/job"
    bb tar -xf "$job_disk" -C "$run/job" job.env environment outputs 2>"$run/tar.log" ||
        fail "cannot read the job disk: $(cat "$run/tar.log")"
    # shellcheck disable=SC1091 # made by the host, every value quoted
    . "$run/job/job.env"
    [ "$VMJOBS_CONTRACT" = 1 ] ||
        fail "this image speaks version 1 of the guest contract, the host version $VMJOBS_CONTRACT"
    bb hostname "vmjob-${VMJOBS_ARRAY_INDEX:-0}"
}

# set_clock: to the host's, where this machine's is off by more than a minute.
set_clock() {
    now=$(date +%s)
    case ${VMJOBS_EPOCH:-} in '' | *[!0-9]*) return 0 ;; esac
    if [ $((now - VMJOBS_EPOCH)) -gt 60 ] || [ $((VMJOBS_EPOCH - now)) -gt 60 ]; then
        bb date -s "@$VMJOBS_EPOCH" >/dev/null
    fi
}

make_scratch() {
    [ -b "$scratch_disk" ] || fail 'there is no scratch disk'
    mkdir -p "$job"
    # The disk lives as long as the job: no journal, and inode tables are cleared later on.
    if ! mke2fs -q -F -t ext4 -m 0 -O ^has_journal -E lazy_itable_init=1,nodiscard \
        "$scratch_disk" >"$run/mke2fs.log" 2>&1; then
        bb mke2fs -F -m 0 "$scratch_disk" >"$run/mke2fs.log" 2>&1 ||
            fail "cannot make a file system on the scratch disk: $(cat "$run/mke2fs.log")"
    fi
    bb mount -t ext4 -o noatime "$scratch_disk" "$job" || fail 'cannot mount the scratch disk'
    mkdir -m 1777 "$job/tmp"
    mkdir "$job/home" "$job/stage"
}

# unpack_job: no network; script and inputs are on the job disk too.
unpack_job() {
    bb tar -xf "$job_disk" -C "$job/stage" 2>"$run/tar.log" ||
        fail "cannot unpack the job: $(cat "$run/tar.log")"
    take_job
}

# take_job: what was unpacked becomes the script and its directory, all of it writable.
take_job() {
    [ -f "$job/stage/script" ] || fail 'the job has no script'
    mv "$job/stage/script" "$job/script"
    if [ -d "$job/stage/inputs" ]; then
        mv "$job/stage/inputs" "$work"
    else
        mkdir "$work"
    fi
    rm -rf "$job/stage"
    chmod 0755 "$job/script"
    chmod -R u+rwX "$work"
}

# first_interface: its name in $interface; true if there is one that is real.
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

start_network() {
    tries=0
    until first_interface; do
        tries=$((tries + 1))
        [ "$tries" -le 50 ] || fail 'there is no network interface'
        pause 0.1 # a driver may still be looking for its hardware
    done
    if ! { bb ip address add 10.0.2.15/24 dev "$interface" && bb ip link set "$interface" up; }; then
        bb ifconfig "$interface" 10.0.2.15 netmask 255.255.255.0 up || fail "cannot set up $interface"
    fi
    if [ "$VMJOBS_NETWORK" = outbound ]; then
        bb ip route add default via 10.0.2.2 || bb route add default gw 10.0.2.2
        rm -f /etc/resolv.conf
        echo 'nameserver 10.0.2.3' >/etc/resolv.conf
    fi
}
