#!/bin/sh
# Executes the script in the same process and session. Its environment is empty, so that the script gets
# none of the guest program's variables, above all not the token.
echo 0 >/proc/self/oom_score_adj 2>/dev/null
for file in /etc/vmjobs/environment /run/vmjobs/job/environment; do
    # shellcheck disable=SC1090 # lines of export NAME='value'
    [ ! -r "$file" ] || . "$file"
done
cd /job/work || exit 126
eval "set -- $VMJOBS_ARGUMENTS"
unset VMJOBS_ARGUMENTS file OLDPWD
exec /job/script "$@"
