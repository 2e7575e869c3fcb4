"""A machine of a gateway that goes wild takes nothing from the others."""

from __future__ import annotations

import json
import shlex
import time

import pytest
import requests

from tests.kit.cli import VMJOBS
from tests.kit.gateway_site import SECONDS, Site, site
from tests.kit.sockets import free_ports
from tests.kit.waiting import wait_until

__all__ = ["site"]

pytestmark = pytest.mark.soak

#: Longest answer of a machine beside a wild one, and for how long it is asked; in seconds.
ANSWER = 10.0
WATCHED = 20.0

WILDNESS = {
    "forks": "fork() { fork | fork & }; fork",
    "memory": "tail /dev/zero",
    "disk": "while :; do head -c 1G /dev/zero >/job/bulk; rm -f /job/bulk; done",
    "network": "while :; do head -c 1G /dev/zero | busybox nc 10.77.0.30 80; done",
    "panic": "echo c >/proc/sysrq-trigger",
}
BEGIN = "#!/bin/sh\necho; echo begun; exec >/dev/null 2>&1; setsid sh /job/wild &\n"


def service(address: str, port: int, wildness: str, **more: object) -> dict[str, object]:
    """A web server; who asks it for cgi-bin/begin lets it go wild."""
    run = ["echo hello >page", "mkdir -p cgi-bin"]
    run += [f"printf '%s' {shlex.quote(BEGIN)} >cgi-bin/begin", "chmod +x cgi-bin/begin"]
    run += [f"echo {shlex.quote(wildness)} >wild", "exec busybox httpd -f -h ."]
    of_image = {"role": "service", "image": "generic", "memory": 128, "disk": 64}
    return of_image | {"address": address, "publish": [f"{port}:80"], "run": "\n".join(run)} | more


@pytest.mark.parametrize("kind", WILDNESS)
def test_the_other_answers(site: Site, kind: str) -> None:
    site.program = (VMJOBS, "gateway")
    calm, wild = free_ports(2)
    limits = {"cpu_percent": 50, "disk_mib_s": 20, "network_mbit_s": 50}
    machines = {
        "calm": service("10.77.0.30", calm, "true"),
        "wild": service("10.77.0.31", wild, WILDNESS[kind], limits=limits),
    }
    declared = {"gateway": "wild", "domain": "test.example", "network": "10.77.0.0/24"}
    (site.folder / "wild.yaml").write_text(json.dumps(declared | {"machines": machines}))
    site.do("install", "wild.yaml")
    site.do("boot")
    begun = requests.get(f"http://127.0.0.1:{wild}/cgi-bin/begin", timeout=SECONDS)
    assert begun.text == "begun\n"
    until = time.monotonic() + WATCHED
    while time.monotonic() < until:
        assert requests.get(f"http://127.0.0.1:{calm}/page", timeout=ANSWER).text == "hello\n"
    assert site.shown("wild")["calm"]["incarnation"] == 1
    if kind == "panic":
        wait_until(lambda: site.shown("wild")["wild"]["incarnation"] > 1, SECONDS, "it boots again")
    site.do("stop")
    site.do("delete", "--yes")
