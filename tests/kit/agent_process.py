"""An agent in a process of its own, on a node with a REST interface."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.api_site import Site
from tests.kit.cli import VMJOBS
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until

#: Seconds until an agent is ready.
SECONDS = 240.0
NODE = "wn1.grid"


@dataclass
class Node:
    site: Site
    folder: Path
    environ: dict[str, str]
    listen: str
    agent: subprocess.Popen[bytes]

    def start(self, script: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a new job as HTCondor's starter does; return its id and its process."""
        (job,) = self.site.user().submit(image="generic", script=script, disk=16, memory=128)
        token = self.folder / f"{job}.token"
        token.write_text(self.site.issuer.job_token(job, "ada"))
        argv = [VMJOBS, "exec", "--job", job, "--token-file", str(token)]
        with (self.folder / "exec.log").open("ab") as log:
            return job, subprocess.Popen(argv, env=self.environ, stderr=log)

    def log(self) -> list[dict[str, str]]:
        text = (self.folder / "agent.log").read_text()
        lines = text.splitlines()[: text.count("\n")]  # the agent may be writing another one
        return [json.loads(line) for line in lines]


@contextmanager
def started(site: Site, url: str, folder: Path) -> Iterator[Node]:
    folder.mkdir()
    listen = f"127.0.0.1:{free_port()}"
    (folder / "token").write_text(site.issuer.node_token(NODE))
    environ = {
        **os.environ,
        "VMJOBS_CONFIG": "/dev/null",
        "VMJOBS_API_URL": url,
        "VMJOBS_AGENT_TOKEN_FILE": str(folder / "token"),
        "VMJOBS_NODE_NAME": NODE,
        "VMJOBS_STATE_DIR": str(folder / "state"),
        "VMJOBS_SOCKET": str(folder / "s"),
        "VMJOBS_HYPERVISORS": "uml",
        "VMJOBS_METRICS_LISTEN": listen,
        "VMJOBS_LOG_FORMAT": "json",
        "VMJOBS_PROBE_SECONDS": "120",
    }
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen([VMJOBS, "agent"], env=environ, stderr=log)
    try:
        wait_until(lambda: (folder / "s").exists() or agent.poll() is not None, SECONDS, "ready")
        assert agent.poll() is None, (folder / "agent.log").read_text()
        yield Node(site, folder, environ, listen, agent)
    finally:
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(240) == 0
