#!/bin/sh
# Becomes the script: same process, same session. Started with an empty environment, so that nothing
# of the guest program's own (least of all the token) reaches the script.
echo 0 >/proc/self/oom_score_adj 2>/dev/null
for file in /etc/vmjobs/environment /run/vmjobs/job/environment; do
    # shellcheck disable=SC1090 # lines of export NAME='value'
    [ ! -r "$file" ] || . "$file"
done
cd /job/work || exit 126
eval "set -- $VMJOBS_ARGUMENTS"
unset VMJOBS_ARGUMENTS file OLDPWD
exec /job/script "$@"
