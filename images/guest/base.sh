# shellcheck shell=sh
# shellcheck disable=SC2034 # used by the other parts
# Words that every part of the guest program uses.
#
# Under User Mode Linux a process costs 20 ms and each byte that `read` takes 50 us. So this program
# starts few processes, and reads little.

lib=${lib:-/usr/lib/vmjobs}
run=${run:-/run/vmjobs} # what the host said, fifos, notes; in memory
job=${job:-/job}        # the scratch disk
work=$job/work          # the script's directory
what=script             # or the image's own program
busybox=${busybox:-/bin/busybox}
container=${container:-}
oom_spared=-1000
VMJOBS_SENTINEL=unknown

newline='
'
applets=
[ ! -x "$busybox" ] || applets=$newline$("$busybox" --list)$newline

# bb TOOL ARGUMENT...: busybox's version where there is one, so that behaviour does not depend on
# the distribution; else whatever the PATH has.
bb() {
    case $applets in
    *"$newline$1$newline"*) "$busybox" "$@" ;;
    *) "$@" ;;
    esac
}

# say WORD...: one line on the console, never glued to what the kernel printed before.
say() {
    printf '\n%s\n' "$*" >/dev/console
}

# fail WORD...: the guest cannot do its job. There is no exit report, so that the host sees a
# failure of the guest and not of the script.
fail() {
    say "vmjobs: error: $*"
    power_off
}

# power_off: at once. Root and scratch disk are thrown away, so nothing is flushed here unless they are to
# be kept; what was written to the output disk has been by then.
power_off() {
    [ -z "${VMJOBS_KEEP:-}" ] || sync
    bb poweroff -n -f
    bb reboot -n -f
    echo o >/proc/sysrq-trigger
    while :; do sleep 60; done
}

# pause SECONDS: between attempts at something that failed.
pause() {
    sleep "$1"
}
