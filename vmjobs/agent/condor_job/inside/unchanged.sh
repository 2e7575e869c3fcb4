#!/bin/sh
# Runs a transparent job in a guest as it would run on the node:
# unchanged.sh USER UID GROUP GID DIRECTORY CHIRP
#
# Inputs, in the working directory: `start`, a shell command that starts the job; `tree.tar`, its directory;
# optionally `input`, its standard input, and `ssh_relay`, address, port and token of the host's SSH relay;
# programs for it. CHIRP is address and port of the job's Chirp service, or empty. Outputs: `ended`, how the job
# ended, followed by files that cannot go back, and why; `left`, all names in the job's directory;
# `changed.tar`, the files that the job made or changed there.
#
# shellcheck disable=SC1091,SC2034,SC2154,SC3013 # parts of the guest program, and their variables; test -nt
here=$PWD
user=$1 uid=$2 group=$3 gid=$4 directory=$5 chirp=$6 relay=

# Only root may read the token; the job's user has no process yet.
if [ -f "$here/ssh_relay" ]; then
    read -r relay <"$here/ssh_relay"
    rm "$here/ssh_relay"
fi

# give_up SENTENCE: this image cannot run such jobs.
give_up() {
    : >"$here/left"
    : >"$here/changed.tar"
    echo "refused $*" >"$here/ended"
    exit 0
}

# add_account: adds the job's user and group to their tables; entries with the same name or number are removed.
add_account() {
    : >>/etc/group
    : >>/etc/passwd
    # shellcheck disable=SC2016 # the variables are awk's
    bb awk -F: '
        BEGIN {
            for (word = 1; word <= 5; word++) {
                given[word] = ARGV[word]
                delete ARGV[word]
            }
            name["/etc/passwd"] = given[1]; number["/etc/passwd"] = given[2]
            name["/etc/group"] = given[3]; number["/etc/group"] = given[4]
            more["/etc/passwd"] = given[4] "::" given[5] ":/bin/sh"
        }
        $1 != name[FILENAME] && $3 != number[FILENAME] { kept[FILENAME] = kept[FILENAME] $0 "\n" }
        END {
            for (table in name)
                printf "%s%s:x:%s:%s\n", kept[table], name[table], number[table], more[table] >table
        }' "$user" "$uid" "$group" "$gid" "$directory" /etc/group /etc/passwd
}

# check_programs: gives up if the image has busybox's versions of programs, which lack options that are used below.
# It is called when one of them has failed: each program that a job starts costs it some milliseconds.
check_programs() {
    find / -maxdepth 0 -cnewer / -printf '' >/dev/null 2>&1 || give_up 'the find of this image is not GNU'
    tar -cf /dev/null --numeric-owner --null --no-recursion -T /dev/null 2>/dev/null ||
        give_up 'the tar of this image is not GNU'
    setpriv --reuid 0 --regid 0 --clear-groups true 2>/dev/null ||
        give_up 'the setpriv of this image is not from util-linux'
}

for tool in setpriv tar find grep; do
    command -v $tool >/dev/null || give_up "the image has no $tool, which HTCondor jobs need"
done
[ -r /usr/lib/vmjobs/script.sh ] || give_up 'the image has no guest program of vmjobs'
run=/run/vmjobs/unchanged # in memory, as a job may use up its disk, and in a directory of root alone
. /usr/lib/vmjobs/base.sh
. /usr/lib/vmjobs/script.sh
add_account
bb mkdir -p "$run" "$directory" "$here/tree" || give_up "cannot create the directory $directory in this image"
bb mount --bind "$here/tree" "$directory" || give_up "cannot mount the directory $directory in this image"
cd "$directory" || give_up "cannot enter the directory $directory in this image"
tar -xpf "$here/tree.tar" --numeric-owner --warning=no-timestamp -C . || { check_programs; exit 1; }
: >"$here/tree.tar" # its space is the job's

# The address of HTCondor's Chirp service for the guest.
if [ -n "$chirp" ] && [ -f .chirp.config ] && [ ! -L .chirp.config ]; then
    read -r _ _ cookie <.chirp.config
    echo "$chirp $cookie" >.chirp.config
    program=/usr/libexec/condor/condor_chirp
    [ -e $program ] || install -D -m 0755 "$here/condor_chirp.sh" $program
    [ -e /usr/bin/condor_chirp ] || bb ln -s $program /usr/bin/condor_chirp
fi

# directories FILE: writes inode and name of each, terminated by a NUL. The files of a moved directory do not change.
# setpriv is there only to try its options: it fails here rather than when the job starts.
directories() {
    setpriv --reuid 0 --regid 0 --clear-groups find . -mindepth 1 -type d -fprintf "$1" '%i %p\0' || return
    [ ! -s "$1" ] || LC_ALL=C sort -z -o "$1" "$1"
}

# Files that change from now on are newer than the mark: the clock has moved past its time.
: >"$here/mark"
directories "$here/directories" || { check_programs; exit 1; }
until : >"$here/now" && [ "$here/now" -nt "$here/mark" ]; do :; done

# For `start`: a shell starts background commands with SIGINT and SIGQUIT ignored, which env can undo. Most guest
# programs know already whether it can.
setpriv=$(command -v setpriv)
if [ "${defaults:-unknown}" = unknown ]; then
    defaults=
    ! env --default-signal=INT --version >/dev/null 2>&1 || defaults=--default-signal=INT,QUIT,PIPE
fi

input=/dev/null
[ ! -e "$here/input" ] || input=$here/input

# Variables of the guest program, which tells `exit 137` from SIGKILL.
ended='' running=' ' status=255
# Signals reach the whole session and are for the job. One that arrives before it starts is sent again.
told=
for signal in HUP INT QUIT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the name as it is now
    trap "told=$signal" "$signal"
done
trap 'changed=1' CHLD
(
    trap - HUP INT QUIT TERM USR1 USR2 CHLD
    set --
    . "$here/start"
) <"$input" &
script=$!
[ -z "$told" ] || kill -s "$told" "$script" 2>/dev/null
if [ -n "$relay" ]; then
    export here uid gid directory relay setpriv defaults busybox
    (
        trap : HUP INT QUIT TERM USR1 USR2
        bb sleep 1 # a job that has ended by then needs no sessions
        exec setsid /bin/sh "$here/ssh_session.sh" keep
    ) </dev/null >/dev/null 2>&1 &
fi
while :; do
    changed=
    look
    is_running "$script" || break
    wait "${changed:-$script}" 2>/dev/null
    status=$?
done
trap - CHLD
trap '' HUP INT QUIT TERM USR1 USR2 # the job has ended: its signals must not stop the rest of this script
outcome
# Whether the kernel has killed processes for lack of memory (proc_vmstat(5)).
! bb grep -s -q '^oom_kill [1-9]' /proc/vmstat || result="$result starved"

: >"$here/over" # no new sessions
# A process that is killed while it forks can crash the User Mode Linux kernel (6.12 was seen to fault when it
# frees the new process's memory). So remaining processes are stopped first, which interrupts no fork.
setpriv --reuid "$uid" --regid "$gid" --clear-groups \
    sh -c 'kill -s STOP -1 && sleep 0.2; kill -s KILL -1' 2>/dev/null
cd "$directory" || give_up "the directory $directory is gone"

# changes TEST...: names of files that the job made or changed, each terminated by a NUL. TEST: of `find`.
changes() {
    directories "$here/directories.now"
    {
        find . -mindepth 1 -cnewer "$here/mark" "$@" -print0
        LC_ALL=C comm -z -13 "$here/directories" "$here/directories.now" | sed -z 's/^[0-9]* //' |
            xargs -0 -r -I'{}' find '{}' "$@" -print0
    } | LC_ALL=C sort -zu
}
export here uid gid setpriv
find . -mindepth 1 -fprint0 "$here/left" -cnewer "$here/mark" -fprint0 "$here/changed" \
    ! -type f -fprint0 "$here/special" || exit
if [ -s "$here/special" ]; then # links, or directories that may have been moved
    changes -type l | xargs -0 -r sh "$here/links.sh" copy
    changes ! -type f ! -type d | xargs -0 -r sh "$here/links.sh" settle
    changes >"$here/changed"
    find . -mindepth 1 -print0 >"$here/left" || exit
fi
tar -cf "$here/changed.tar" --numeric-owner --null --no-recursion -T "$here/changed" || exit
{
    echo "$result"
    [ ! -e "$here/rejected" ] || head -c 65536 "$here/rejected"
} >"$here/ended"
