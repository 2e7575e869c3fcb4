#!/bin/sh
# Runs as root in a computing element while its pool runs: lets it accept these nodes of the site, and no others.
# If one was removed, its ads go, and its jobs run again elsewhere.
set -u
umask 022
cd /etc/condor/config.d || exit
# HTCondor reads no file of this name as configuration.
new=.95-gateway-nodes.conf.new
echo '@CONFIG@' >"$new" && mv "$new" 95-gateway-nodes.conf && condor_reconfig -daemon collector >/dev/null || exit

removed=@REMOVED@
[ -n "$removed" ] || exit 0
for ads in 'STARTD Machine' 'STARTD StartD' 'MASTER DaemonMaster'; do
    printf 'MyType = "Query"\nTargetType = "%s"\nRequirements = Machine == "%s"\n' "${ads#* }" "$removed" |
        condor_advertise -tcp "INVALIDATE_${ads% *}_ADS" - >/dev/null || exit
done
condor_vacate_job -fast -constraint "splitSlotName(RemoteHost)[1] == \"$removed\"" >/dev/null 2>&1
exit 0
