"""Path of the agent's socket, for programs that start too often to read all settings."""

from __future__ import annotations

import os
import re

DEFAULT_FILE = "/etc/vmjobs/config.toml"
#: Long, because a node under full load answers slowly and must not lose its jobs for that.
ANSWER_SECONDS = 60
#: The setting as a plain line. It counts only above the first TOML table, where settings are.
_SOCKET_LINE = re.compile(r'^socket *= *"([^"\\]*)" *(?:#.*)?$', re.MULTILINE)


def default_socket() -> str:
    """The agent's socket if no setting names one."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.path.expanduser("~/.cache")
    return os.path.join(base, "vmjobs", "agent.sock")


def agent_socket() -> str:
    """The path of the agent's socket, from the settings.

    Raises:
        OSError, ValueError: the configuration file cannot be read.
    """
    if named := os.environ.get("VMJOBS_SOCKET"):
        return named
    try:
        with open(os.environ.get("VMJOBS_CONFIG") or DEFAULT_FILE, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return default_socket()
    if "socket" not in text:
        return default_socket()
    # A multi-line string may contain a line that looks like the setting.
    found = (
        _SOCKET_LINE.search(text.partition("\n[")[0])
        if '"""' not in text and "'''" not in text
        else None
    )
    if found:
        return found[1]
    import tomllib  # noqa: PLC0415 - it takes longer to import than the rest of this program

    return str(tomllib.loads(text).get("socket") or default_socket())
