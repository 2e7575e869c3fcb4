"""The command line with a test's role kit: VMs that count their boots and keep a file.

As a program it is ``vmjobs``, for tests that run and kill it as a supervisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib import resources

from node.cli.gateway import common, install
from vmjobs.cli.main import main
from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import NotFound
from vmjobs.gateway.spec import Gateway, GatewayVm

SCRIPT = rb"""#!/bin/sh
trap 'sync; echo frozen-$boots > /job/frozen; sync; echo "vmjobs-gateway: frozen"' USR1
trap 'echo "vmjobs-gateway: thawed"; say_up' USR2
trap 'echo "boots $boots ended"; exit 0' TERM
here=$PWD
say_up() { take_token; echo "vmjobs-gateway: up"; }
take_token() (
    . "$here/common.sh"
    renew_token /run/own/token root:root && echo "has $(cat /run/own/token)"
)
boots=$(($(cat /job/boots 2>/dev/null || echo 0) + 1))
echo "$boots" > /job/boots
echo "room $(df --output=size -B 1M /job | tail -n 1)"
echo "root $(cat /etc/boots 2>/dev/null || echo fresh)"
echo "$boots" > /etc/boots
sync
busybox ip address add "$(cat "$here/address")" dev vec1
busybox ip link set vec1 up
echo "boot $boots of $(cat "$here/host") with $(cat "$here/secret")"
setsid sh "$here/reach" &  # signals are for this script alone
mkdir -p /run/web/cgi-bin && cp "$here/host" /run/web/host
cat > /run/web/cgi-bin/connect <<'END'
#!/usr/bin/perl
# Connect to an address from the port 8081.
use IO::Socket::INET;
my $to = IO::Socket::INET->new(PeerAddr => $ENV{QUERY_STRING}, LocalPort => 8081, Timeout => 5);
print "Content-type: text/plain\n\n", $to ? "connected" : $@;
END
chmod +x /run/web/cgi-bin/connect
setsid busybox httpd -f -p 8080 -h /run/web &
say_up
while :; do
    sleep 1000 &
    wait
done
"""


REACH = rb"""
for other in $(grep -v " $(cat host) " hosts | cut -d ' ' -f 1); do
    until busybox ping -c 1 -W 1 "$other" > /dev/null 2>&1; do
        echo "no answer from $other"
        sleep 0.2
    done
    echo "reached $other"
done
"""


class CountingKit:
    """A kit for VMs of any role, with a secret that is made once."""

    minted = 0

    def secrets(self, gateway: Gateway) -> Mapping[str, bytes]:
        return {"key": f"the key of {gateway.name}".encode()}

    def files(
        self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        common = (resources.files("condor") / "gateway" / "common.sh").read_bytes()
        return {"script": SCRIPT, "reach": REACH, "secret": secrets["key"], "common.sh": common}

    def token(self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]) -> PoolToken:
        """Make a new token, which is valid for seconds."""
        self.minted += 1
        expires = datetime.now(UTC) + timedelta(seconds=20)
        return PoolToken(token=f"token {self.minted} of {vm.name}", identity="", expires=expires)

    def person_token(self, gateway: Gateway, person: str, secrets: Mapping[str, bytes]) -> PoolToken:
        """Refuse: nothing in these VMs accepts one."""
        raise NotFound("nothing accepts a token")


if __name__ == "__main__":
    for module in (common, install):
        setattr(module, "role_kit", CountingKit)  # noqa: B010  install imports it by name
    main()
