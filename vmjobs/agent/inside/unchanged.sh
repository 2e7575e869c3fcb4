#!/bin/sh
# Runs a job of HTCondor's in a guest as it would run on the node:
# unchanged.sh USER UID GROUP GID DIRECTORY CHIRP
#
# Beside this script's directory lie, as inputs: `start`, words of a shell that become the job; `tree.tar`,
# its directory; perhaps `input`, what it reads; perhaps `door`, address, port and token of the host's door;
# programs for it. CHIRP is address and port of the job's Chirp service, empty where there is none. As outputs it
# leaves: `ended`, how the job ended, and below that what cannot go back, and why; `left`, all names in its
# directory; `changed.tar`, what the job made or changed there.
#
# shellcheck disable=SC1091,SC2034,SC2154 # parts of the guest program, and their variables
here=$PWD
user=$1 uid=$2 group=$3 gid=$4 directory=$5 chirp=$6 door=

# The token is for root alone, and the job's user is not there yet.
if [ -f "$here/door" ]; then
    read -r door <"$here/door"
    rm "$here/door"
fi

# give_up SENTENCE: this image cannot run such jobs.
give_up() {
    : >"$here/left"
    : >"$here/changed.tar"
    echo "refused $*" >"$here/ended"
    exit 0
}

# account TABLE NAME ID REST: in a table of users or groups; who has the name or the number goes.
account() {
    grep -v -e "^$2:" -e "^[^:]*:[^:]*:$3:" "$1" >"$here/table" 2>/dev/null
    echo "$2:x:$3:$4" >>"$here/table"
    cat "$here/table" >"$1" && rm "$here/table"
}

for tool in setpriv tar find grep; do
    command -v $tool >/dev/null || give_up "the image has no $tool, which a job of HTCondor needs in it"
done
[ -r /usr/lib/vmjobs/script.sh ] || give_up 'the image does not have the guest program of vmjobs'
run=/run/vmjobs-unchanged # in memory: a job may use up its disk
mkdir -m 0700 "$run" || exit
. /usr/lib/vmjobs/base.sh
. /usr/lib/vmjobs/script.sh
# What busybox has by these names knows too little.
find / -maxdepth 0 -cnewer / -printf '' >/dev/null 2>&1 || give_up 'the find of this image is not GNU'
tar -cf /dev/null --numeric-owner --null --no-recursion -T /dev/null 2>/dev/null ||
    give_up 'the tar of this image is not GNU'
setpriv --reuid 0 --regid 0 --clear-groups true 2>/dev/null ||
    give_up 'the setpriv of this image is not that of util-linux'

account /etc/group "$group" "$gid" ''
account /etc/passwd "$user" "$uid" "$gid::$directory:/bin/sh"
mkdir -p "$directory" "$here/tree" || give_up "the image cannot have the directory $directory"
bb mount --bind "$here/tree" "$directory" || give_up "the image cannot have the directory $directory"
cd "$directory" || give_up "the image cannot have the directory $directory"
tar -xpf "$here/tree.tar" --numeric-owner -C . || exit
rm "$here/tree.tar"

# HTCondor's Chirp service, as it is reached from here.
if [ -n "$chirp" ] && [ -f .chirp.config ] && [ ! -L .chirp.config ]; then
    read -r _ _ cookie <.chirp.config
    echo "$chirp $cookie" >.chirp.config
    program=/usr/libexec/condor/condor_chirp
    [ -e $program ] || bb install -D -m 0755 "$here/condor_chirp.sh" $program
    [ -e /usr/bin/condor_chirp ] || bb ln -s $program /usr/bin/condor_chirp
fi

# directories: inode and name of each, with a NUL behind it. One that is moved keeps what it holds as it was.
directories() {
    find . -mindepth 1 -type d -printf '%i %p\0' | LC_ALL=C sort -z
}
directories >"$here/directories"

# Whatever changes from now on is newer than the mark, whose time the clock has left behind.
: >"$here/mark"
until : >"$here/now" && [ -n "$(find "$here/now" -newer "$here/mark")" ]; do :; done

# For `start`. A shell begins background commands with SIGINT and SIGQUIT ignored; env can undo it.
setpriv=$(command -v setpriv)
defaults=
! env --default-signal=INT --version >/dev/null 2>&1 || defaults=--default-signal=INT,QUIT,PIPE

input=/dev/null
[ ! -e "$here/input" ] || input=$here/input

# starved: how often the kernel has killed something, as there was no memory left (proc_vmstat(5)).
starved() {
    grep -s '^oom_kill ' /proc/vmstat
}
before=$(starved)

# The guest program's own way to tell `exit 137` from SIGKILL.
ended='' running=' ' status=255
# Signals reach the whole session: they are the job's. One that comes before the job is there is told again.
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
if [ -n "$door" ]; then
    export here uid gid directory door setpriv defaults busybox
    setsid /bin/sh "$here/visit.sh" keep </dev/null >/dev/null 2>&1 &
fi
while :; do
    changed=
    look
    is_running "$script" || break
    wait "${changed:-$script}" 2>/dev/null
    status=$?
done
trap - CHLD
trap '' HUP INT QUIT TERM USR1 USR2 # the job has ended: what is left to do is not to be ended by its signals
outcome
[ "$(starved)" = "$before" ] || result="$result starved"

: >"$here/over" # nobody enters any more
# What is killed while it forks takes the kernel of User Mode Linux along (6.12 was seen to fault where the new
# process's memory is given back), so that whatever is left is stopped before: that ends no fork early.
setpriv --reuid "$uid" --regid "$gid" --clear-groups \
    sh -c 'kill -s STOP -1 && sleep 0.2; kill -s KILL -1' 2>/dev/null
cd "$directory" || give_up "the directory $directory is gone"

# changes WHICH...: names of what the job made or changed, each with a NUL behind it. WHICH: as `find` has it.
changes() {
    {
        find . -mindepth 1 -cnewer "$here/mark" "$@" -print0
        directories | LC_ALL=C comm -z -13 "$here/directories" - | sed -z 's/^[0-9]* //' |
            xargs -0 -r -I'{}' find '{}' "$@" -print0
    } | LC_ALL=C sort -zu
}
export here uid gid setpriv
changes -type l | xargs -0 -r sh "$here/links.sh" copy
changes ! -type f ! -type d | xargs -0 -r sh "$here/links.sh" settle
changes >"$here/changed"
tar -cf "$here/changed.tar" --numeric-owner --null --no-recursion -T "$here/changed" || exit
find . -mindepth 1 -print0 >"$here/left" || exit
{
    echo "$result"
    [ ! -e "$here/rejected" ] || head -c 65536 "$here/rejected"
} >"$here/ended"
