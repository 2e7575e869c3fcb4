"""A user's computer, which pushes and pulls images with the command line."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from api.tokens import make_issuer
from tests.kit.cli import VMJOBS, Run, vmjobs
from tests.kit.sockets import free_port
from vmjobs.config import Config


@dataclass
class Workstation:
    """A user's computer: its own home, cache and image store, and a token.

    typed: runs commands in this process, which is faster.
    """

    home: Path
    url: str
    token: Path
    more: dict[str, str] = field(default_factory=dict)
    typed: Run | None = None

    def environ(self) -> dict[str, str]:
        own = {
            "VMJOBS_CONFIG": "/dev/null",
            "VMJOBS_API_URL": self.url,
            "VMJOBS_TOKEN_FILE": str(self.token),
            "VMJOBS_DATA_DIR": str(self.home / "data"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }
        return {**os.environ, **own, **self.more}

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start ``vmjobs image …``."""
        command = [VMJOBS, "image", *map(str, arguments)]
        return subprocess.Popen(
            command,
            env=self.environ(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str | Path, code: int = 0) -> str:
        """Run ``vmjobs image …`` to its end; return its output, or its errors if it should fail."""
        if self.typed is None:
            done = vmjobs("image", *arguments, code=code, environ=self.environ(), timeout=400)
        else:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self.environ().items():
                    patch.setenv(name, value)
                done = self.typed("image", *arguments, code=code)
        return done.err if code else done.out

    def json(self, *arguments: str | Path) -> Any:
        """Run the same with ``--json``; return the parsed output."""
        return json.loads(self.run(*arguments, "--json"))


def alone(folder: Path, **settings: Any) -> Config:
    """Settings of a service of its own."""
    values = {"listen": f"127.0.0.1:{free_port()}", "api_workers": 1, **settings}
    return Config(data_dir=folder / "data", **values)


def make_workstation(
    config: Config, url: str, home: Path, user: str = "", typed: Run | None = None, **how: Any
) -> Workstation:
    token = home / "token"
    token.parent.mkdir(parents=True, exist_ok=True)
    name = user or f"u{abs(hash(str(home))) % 10**9}"
    token.write_text(make_issuer(config).user_token(name, **how))
    return Workstation(home, url, token, typed=typed)
