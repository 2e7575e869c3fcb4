# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# Runs the script, passes on its output, delivers signals, and determines its exit status.
#
# Process 1 is the script's parent and holds both ends of the fifos for its output. So if the script kills the
# helper processes (`kill -9 -1` kills them all), process 1 restarts them where they were; no output is lost and
# the script gets no SIGPIPE.

drain_seconds=2   # for background processes to finish their output after the script's end
flush_seconds=120 # for delivering the pipes' contents after that

# Data that a helper has read but not written is lost if it is killed. So programs that read the script's output
# get a higher priority: with one processor, the script runs only after they have written everything.
at_once=
! command -v chrt >/dev/null || at_once='chrt -f 1'

# first PROGRAM ARGUMENT...: runs it with the highest priority, if that is allowed.
first() {
    if [ -n "$at_once" ]; then
        $at_once "$@"
        code=$?
        # A program that failed by itself is not run again: it may have read data.
        if [ "$code" = 0 ] || $at_once true 2>/dev/null; then return "$code"; fi
        at_once=
    fi
    "$@"
}

# announce_ready: reports that the guest has booted and has its job.
announce_ready() {
    if [ "$VMJOBS_NETWORK" != none ]; then
        post_text main /v1/ready '' || fail "cannot report to $VMJOBS_ENDPOINT (status $http_status)"
    fi
    say "vmjobs:$VMJOBS_SENTINEL:ready"
}

# start_script: starts it in a session of its own, so that a signal reaches all its processes.
start_script() {
    if [ -z "$container" ]; then find_defaults; else defaults=; fi
    (
        trap - PIPE CHLD INT TERM
        exec 3>&- 4>&- 8<&- 9<&- # ends of the pipes: not for the script
        [ -z "$container" ] || start_in_container
        # shellcheck disable=SC2086 # no argument if env lacks the option
        exec setsid ${defaults:+/usr/bin/}env -i $defaults \
            PATH="$PATH" HOME="$job/home" LANG=C.UTF-8 TMPDIR="$job/tmp" \
            VMJOBS_JOB_ID="$VMJOBS_JOB_ID" VMJOBS_ARRAY_INDEX="$VMJOBS_ARRAY_INDEX" \
            VMJOBS_ARRAY_COUNT="$VMJOBS_ARRAY_COUNT" VMJOBS_ARGUMENTS="${VMJOBS_ARGUMENTS:-}" \
            /bin/sh "$lib/launch.sh"
    ) </dev/null >"$script_out" 2>"$script_err" &
    script=$!
}

# deliver NUMBER: sends a signal to the script's process group.
deliver() {
    case $1 in '' | *[!0-9]*) return 0 ;; esac
    # dash demands the `--` and takes it for a process in `kill -N -- -GROUP`; busybox's shell always does.
    dashes=--
    [ "$applets" != shell ] || dashes=
    # shellcheck disable=SC2086 # no word for busybox's
    kill -s "$1" $dashes "-$script" 2>/dev/null || kill -s "$1" "$script" 2>/dev/null
}

# control: requests signals from the host repeatedly, which is also the heartbeat. The request has the number of
# signals delivered so far: the host repeats signals that are not acknowledged, as an answer may be lost.
control() {
    trap - CHLD INT TERM
    exec 3>&- 4>&- # otherwise the pumps never see the end of the output
    delivered=0
    [ ! -s "$run/control.delivered" ] || read -r delivered <"$run/control.delivered"
    while :; do
        if http control GET "/v1/control?wait=25&done=$delivered" >"$run/control.orders"; then
            while read -r verb number; do
                [ "$verb" = signal ] || continue
                deliver "$number"
                delivered=$((delivered + 1))
                echo "$delivered" >"$run/control.delivered"
            done <"$run/control.orders"
        else
            go_on || pause 1
        fi
    done
}

# pump NAME: sends the fifo's data to the host as soon as it arrives. A restarted pump continues where it was.
pump() {
    trap - CHLD INT TERM
    open_output "$1"
    talk carry "$1" <&7
}

# unsent NAME: true if data of it has been read that the host has not accepted yet.
unsent() {
    for chunk in "$run/$1".[0-9]*; do
        [ ! -s "$chunk" ] || return 0
    done
    return 1
}

# save NAME: writes the fifo's data to a file, for the output disk. The script does not write the file directly:
# `echo >/dev/stderr` would truncate it. Once the disk is full, the rest is lost.
save() {
    trap - CHLD INT TERM
    open_output "$1"
    kept=$job/std$1
    [ ! -e "$run/$1.full" ] || kept=/dev/null
    first cat <&7 >>"$kept" 2>/dev/null || {
        [ $? -le 128 ] || return
        say "vmjobs: error: std$1 lost bytes (the disk is full)"
        : >"$run/$1.full"
        : >"$run/undelivered"
        return
    }
    : >"$run/$1.over"
}

# open_output NAME: duplicates it for reading, as 7. Opening the path would block after the script's end.
open_output() {
    case $1 in out) exec 7<&8 ;; err) exec 7<&9 ;; esac
    exec 3>&- 4>&-
}

# carry_on: restarts each helper for output that was killed, as of the last `look`.
carry_on() {
    [ -e "$run/out.over" ] || is_running "$out_pid" || { $carry out & out_pid=$!; }
    [ -e "$run/err.over" ] || is_running "$err_pid" || { $carry err & err_pid=$!; }
}

# drain: waits until all output is passed on; after $drain_seconds it kills processes that still print.
drain() {
    wait_for "$drain_seconds" "$out_pid" "$err_pid" || kill_leftovers
}

# look: reads the state of the children. Sets $running to the pids that run, and $ended to the shell's word for
# the script's end.
#
# `wait` alone cannot tell `exit 137` from SIGKILL: both are 137. The list of jobs can: it has "Done(137)" or
# "Killed". It is printed to a file since a $(...) would be another shell.
look() {
    jobs -l >"$run/jobs"
    running=' '
    while read -r line; do
        # shellcheck disable=SC2086 # split into words: pid, then the state
        set -- ${line#*]}
        case $1 in + | -) shift ;; esac
        pid=$1
        shift
        case $* in
        Running*) running="$running$pid " ;;
        *) [ "$pid" != "$script" ] || ended=${*:-Done} ;;
        esac
    done <"$run/jobs"
}

# is_running PID: true if it ran at the last `look`.
is_running() {
    case $running in *" $1 "*) return 0 ;; esac
    return 1
}

# wait_for SECONDS PID...: waits until all have ended; false if the time is over before.
wait_for() {
    patience=$1 timer=
    shift
    while :; do
        look
        left=
        for pid in "$@"; do
            is_running "$pid" && left=$pid
        done
        if [ -z "$left" ]; then
            [ -z "$timer" ] || kill "$timer" 2>/dev/null
            return 0
        fi
        if [ -z "$timer" ]; then
            sleep "$patience" &
            timer=$!
        elif ! is_running "$timer"; then
            return 1
        fi
        wait "$left" # returns when any child ends: SIGCHLD is trapped
    done
}

# supervise: keeps the helpers alive until the script has ended.
#
# A `wait` that starts later misses a helper that ends after `look`. Then $changed is set, and `wait` gets a
# number that is no child, so that it returns at once.
supervise() {
    while :; do
        changed=
        look
        is_running "$script" || return 0
        if [ "$VMJOBS_NETWORK" != none ]; then
            is_running "$control_pid" || { control & control_pid=$!; }
        fi
        carry_on
        wait "${changed:-$script}" 2>/dev/null
        status=$?
    done
}

# kill_leftovers: kills all processes that the script left, which are those in other sessions than the guest
# program. If another init runs, only the script's own session.
kill_leftovers() {
    session_of $$
    mine=$session
    for entry in /proc/[0-9]*; do
        [ -e "$entry/exe" ] || continue # a kernel thread
        pid=${entry#/proc/}
        session_of "$pid" || continue
        if [ "$session" = "$script" ] || { [ $$ = 1 ] && [ "$session" != "$mine" ]; }; then
            kill -9 "$pid" 2>/dev/null
        fi
    done
}

# session_of PID: sets $session. The second field of stat, a name in brackets, may contain any character.
session_of() {
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    # shellcheck disable=SC2086 # words: state, parent, process group, session
    set -- ${stat##*) }
    session=${4:-}
}

# outcome: sets $result to `code=N` or `signal=N`, from the shell's word; from the status of `wait` if the shell
# uses an unknown word.
# shellcheck disable=SC2034 # collect.sh
outcome() {
    case $ended in
    Done) result=code=0 ;;
    'Done('*) ended=${ended#*\(} && result=code=${ended%%)*} ;;
    Hangup*) result=signal=1 ;;
    Interrupt*) result=signal=2 ;;
    Quit*) result=signal=3 ;;
    Illegal*) result=signal=4 ;;
    Trace*) result=signal=5 ;;
    Aborted*) result=signal=6 ;;
    'Bus error'*) result=signal=7 ;;
    Floating*) result=signal=8 ;;
    Killed*) result=signal=9 ;;
    'User defined signal 1'*) result=signal=10 ;;
    Segmentation*) result=signal=11 ;;
    'User defined signal 2'*) result=signal=12 ;;
    'Broken pipe'*) result=signal=13 ;;
    'Alarm clock'*) result=signal=14 ;;
    Terminated*) result=signal=15 ;;
    'Stack fault'*) result=signal=16 ;;
    'CPU time'*) result=signal=24 ;;
    'File size'*) result=signal=25 ;;
    'Virtual timer'*) result=signal=26 ;;
    Profiling*) result=signal=27 ;;
    'I/O possible'*) result=signal=29 ;;
    'Power failure'*) result=signal=30 ;;
    'Bad system call'*) result=signal=31 ;;
    'Real-time signal '*) ended=${ended#Real-time signal } && result=signal=$((34 + ${ended%%[!0-9]*})) ;;
    *) if [ "$status" -gt 128 ]; then result=signal=$((status - 128)); else result=code=$status; fi ;;
    esac
}

# run_script: runs the script to its end; sets $result to `code=N` or `signal=N`.
run_script() {
    ended='' running=' ' status=255 control_pid=0 out_pid=0 err_pid=0
    trap 'changed=1' CHLD      # lets `wait` return when any child ends
    trap 'deliver 15' INT TERM # the host asks this VM to stop
    carry=pump
    [ "$VMJOBS_NETWORK" != none ] || carry=save
    script_out=$run/out.fifo script_err=$run/err.fifo
    exec 3<>"$script_out" 4<>"$script_err"
    exec 8<"$script_out" 9<"$script_err"
    start_script
    supervise
    exec 3>&- 4>&-
    drain
    if [ ! -e "$run/out.over" ] || [ ! -e "$run/err.over" ]; then # helpers were killed with the script
        carry_on
        drain
    fi
    wait_for "$flush_seconds" "$out_pid" "$err_pid" || {
        say 'vmjobs: error: the logs are incomplete'
        # A helper that only waits for more output, of a process that the script left, has sent everything.
        if unsent out || unsent err; then : >"$run/undelivered"; fi
    }
    [ "$control_pid" = 0 ] || kill "$control_pid" 2>/dev/null
    kill_leftovers
    outcome
    trap - CHLD
}
