#!/bin/sh
# shellcheck disable=SC2154 # variables of the image's program file
# enter.sh script|program: run one or the other, as the image's user and with its environment. Started with
# an empty environment, so that it contains nothing of the guest program (above all not the token).
#
# The image's variables may have any name, so they are set last, when this script needs no more variables.
echo 0 >/proc/self/oom_score_adj 2>/dev/null
# shellcheck source=/dev/null
. /.vmjobs/program
if [ "$1" = script ]; then
    cd /.vmjobs/job/work || exit 126
    eval "set -- /.vmjobs/job/script $VMJOBS_ARGUMENTS"
else
    cd "$program_directory" || exit 126
    eval "set -- $program_arguments ${VMJOBS_ARGUMENTS:-$program_command}"
fi
if [ $# = 0 ]; then
    echo 'vmjobs: this image has neither an entry point nor a command' >&2
    exit 127
fi

# A shell starts background commands with SIGINT and SIGQUIT ignored permanently; env restores them.
set -- /.vmjobs/lib/ld.so --inhibit-cache --library-path /.vmjobs/lib /.vmjobs/bin/env \
    --default-signal=INT,QUIT,PIPE \
    /.vmjobs/lib/ld.so --inhibit-cache --library-path /.vmjobs/lib /.vmjobs/bin/setpriv \
    --reuid="$program_uid" --regid="$program_gid" --groups="$program_groups" -- "$@"
read -r hostname </proc/sys/kernel/hostname
export HOSTNAME="$hostname" HOME="$program_home"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
unset VMJOBS_ARGUMENTS PWD OLDPWD SHLVL
# shellcheck source=/dev/null
. /.vmjobs/environment
# shellcheck source=/dev/null
. /.vmjobs/run/guest/job/environment
exec "$@"
