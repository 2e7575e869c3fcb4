# shellcheck shell=sh
# shellcheck disable=SC2034 # used by the other parts
# Functions and variables that all parts of the guest program use.
#
# Under User Mode Linux a process costs some milliseconds, and each byte that `read` takes is a system call
# of 13 us or more. So this program starts few processes, and reads little.

lib=${lib:-/usr/lib/vmjobs}
run=${run:-/run/vmjobs} # the job's description, fifos, state files; in memory
job=${job:-/job}        # the scratch disk
work=$job/work          # the script's directory
what=script             # or program: the image's own
busybox=${busybox:-/bin/busybox}
container=${container:-}
oom_spared=-1000
VMJOBS_SENTINEL=unknown

newline='
'
# What the first of this guest's programs has found out, for the others: where busybox's tools are, and env's options.
# applets: `shell`: this shell has them, which saves half of what a process costs; `all` of $busybox; or their names.
found=/run/vmjobs/found
applets='' defaults=unknown
if [ -r $found ]; then
    # shellcheck source=/dev/null
    . $found
elif [ -x "$busybox" ]; then
    if [ "$(command -v mkdir)" = mkdir ]; then applets=shell; else applets=$newline$("$busybox" --list)$newline; fi
fi

# find_defaults: sets $defaults to env's option for signals: a shell starts background commands with SIGINT and SIGQUIT
# ignored, which only GNU's env can undo.
find_defaults() {
    [ "$defaults" = unknown ] || return 0
    defaults=
    ! /usr/bin/env --default-signal=INT --version >/dev/null 2>&1 || defaults='--default-signal=INT,QUIT,PIPE'
    [ "$applets" != shell ] || known=all
    printf "applets='%s'\ndefaults='%s'\n" "${known:-$applets}" "$defaults" >$found
}

# bb TOOL ARGUMENT...: runs busybox's version if there is one, so that behaviour does not depend on the
# distribution; otherwise the one in the PATH.
bb() {
    case $applets in
    shell) "$@" ;;
    all | *"$newline$1$newline"*) "$busybox" "$@" ;;
    *) "$@" ;;
    esac
}

# say WORD...: prints a line on the console, after a newline, as the kernel may have printed half a
# line.
say() {
    printf '\n%s\n' "$*" >/dev/console
}

# fail WORD...: reports an error and powers off without an exit report, so that the host sees a failure
# of the guest and not of the script.
fail() {
    say "vmjobs: error: $*"
    power_off
}

# power_off: powers off at once. The root and scratch disks are discarded, so nothing is flushed unless
# they are kept; the output disk has been flushed before.
power_off() {
    [ -z "${VMJOBS_KEEP:-}" ] || sync
    bb poweroff -n -f
    bb reboot -n -f
    echo o >/proc/sysrq-trigger
    while :; do sleep 60; done
}

# pause SECONDS: waits between two tries.
pause() {
    sleep "$1"
}
