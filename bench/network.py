"""Benchmark 19: a guest's transfers in mode ``outbound``, over slirp4netns by hand."""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from bench.figures import Finding, compare, in_turns
from bench.start_overhead import execute
from vmjobs.agent.run.services import RunServices
from vmjobs.hypervisor.network.guest_network import MTU
from vmjobs.hypervisor.network.outbound import node_addresses
from vmjobs.model import MIB, HypervisorKind, JobSpec, NetworkMode

#: Bytes each way; they come from memory and are discarded.
SIZE = 512 * MIB
_PIECE = MIB


class Server(http.server.ThreadingHTTPServer):
    """Sends and receives bytes, and notes how many seconds the last exchange took."""

    took = 0.0


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        piece, began = bytes(_PIECE), time.monotonic()
        for _ in range(SIZE // _PIECE):
            self.wfile.write(piece)
        self.server.took = time.monotonic() - began

    def do_POST(self) -> None:
        left, room, began = int(self.headers["Content-Length"]), bytearray(_PIECE), time.monotonic()
        while left and (taken := self.rfile.readinto(memoryview(room)[: min(left, _PIECE)])):
            left -= taken
        self.server.took = time.monotonic() - began
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *words: object) -> None:
        """Log nothing."""


@contextmanager
def _serving() -> Iterator[tuple[Server, str, int]]:
    """Run a server on an address of this host, which guests may reach here."""
    address = next(str(one[0]) for one in node_addresses() if not one.is_loopback)
    with Server((address, 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server, address, server.server_port
        finally:
            server.shutdown()


def guest_network(made: RunServices, digest: str, pairs: int) -> Iterator[Finding]:
    """Compare a guest's transfers with those of the same program behind slirp4netns."""
    with _serving() as (server, host, port):
        head = f"POST / HTTP/1.0\\r\\nContent-Length: {SIZE}\\r\\n\\r\\n"
        ways = {
            "down": f"busybox wget -q -O /dev/null http://{host}:{port}/",
            "up": f"exec 3<>/dev/tcp/{host}/{port}; printf '{head}' >&3; "
            f"dd if=/dev/zero bs=1M count={SIZE // MIB} >&3; cat <&3",
        }

        def by_guest(command: str) -> float:
            spec = JobSpec(
                image=digest,
                script=f"#!/bin/bash\n{command}\n",
                hypervisor=HypervisorKind.UML,
                network=NetworkMode.OUTBOUND,
            )
            execute(made, digest, spec)
            return server.took

        def by_hand(command: str) -> float:
            place = ["unshare", "-Urn", "sh", "-c", "echo; exec sleep 600"]
            with subprocess.Popen(place, stdout=subprocess.PIPE) as inside, ExitStack() as stack:
                stack.callback(inside.kill)
                assert inside.stdout is not None
                inside.stdout.readline()  # it is in its namespaces now
                reader, writer = os.pipe()
                slirp = ["slirp4netns", "--configure", f"--mtu={MTU}", f"--ready-fd={writer}"]
                carries = subprocess.Popen(
                    [*slirp, str(inside.pid), "tap0"],
                    pass_fds=[writer],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                stack.callback(carries.wait)
                stack.callback(carries.kill)
                os.read(reader, 1)
                os.close(reader)
                os.close(writer)
                enter = ["nsenter", "--preserve-credentials", "-t", str(inside.pid), "-U", "-n"]
                subprocess.run(
                    [*enter, "bash", "-c", command],
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            return server.took

        for way, command in ways.items():
            guest, hand = partial(by_guest, command), partial(by_hand, command)
            guest(), hand()  # not counted
            seen = in_turns(pairs, guest, hand)
            what = f"guest's network, {SIZE // MIB} MiB {way}"
            yield compare(19, what, seen, 2.0, measure="guest / slirp4netns by hand")
