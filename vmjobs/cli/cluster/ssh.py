"""``vmjobs cluster ssh`` and ``scp``: run OpenSSH's programs over the service."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from vmjobs.cli.common import OWN_COMMAND, client
from vmjobs.errors import ConfigError, InvalidRequest
from vmjobs.relay import relay
from vmjobs.subprocess import run

#: Options after the VM's name belong to the command.
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_SSH_FLAGS = "46AaCfGgKkMNnqsTtVvXxYy"
#: Names of a login's files.
KEY_FILE, KNOWN_HOSTS_FILE = "key", "known_hosts"
_SSH_VALUE_OPTIONS = "BbcDEeFIiJLlmOoPpQRSWw"


@click.command(context_settings=_PASS_THROUGH)
@click.argument(
    "words", metavar="[SSH-OPTIONS] VM-NAME [--] [COMMAND]...", nargs=-1, type=click.UNPROCESSED
)
def ssh(words: tuple[str, ...]) -> None:
    """Log in to VM-NAME as root, or run COMMAND in it and exit with its status.

    VM-NAME is a cluster VM, such as workers-1. The command requires an operator's token, and `vmjobs
    cluster events` lists each login. ssh is OpenSSH's; its options go before VM-NAME: -t for a
    terminal, -L 8080:localhost:80 for a port. rsync uses it as -e 'vmjobs cluster ssh'.
    """
    options, vm, command = split_ssh_arguments(words)
    with open_login(vm) as login:
        status = run_openssh(["ssh", *login, *options, "--", vm, *command])
    sys.exit(status)


@click.command(context_settings=_PASS_THROUGH)
@click.argument("words", metavar="[SCP-OPTIONS] SOURCE... TARGET", nargs=-1, type=click.UNPROCESSED)
def scp(words: tuple[str, ...]) -> None:
    """Copy files between this host and a cluster VM (VM-NAME:PATH). See `ssh`."""
    places = [
        word.partition(":")[0] for word in words if ":" in word and "/" not in word.partition(":")[0]
    ]
    vms = sorted({place for place in places if not place.startswith("-")})
    if len(vms) != 1:
        raise InvalidRequest(
            "one side of a copy must be a cluster VM, as VM-NAME:PATH, and the other a local path"
        )
    with open_login(vms[0]) as login:
        status = run_openssh(["scp", *login, *words])
    sys.exit(status)


@click.command(hidden=True)
@click.argument("session")
def connect(session: str) -> None:
    """Relay a session's bytes between the service and stdin and stdout: ssh runs this."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with client() as api:
        relay(api.clusters.session(session), sys.stdin.fileno(), sys.stdout.fileno())


def split_ssh_arguments(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Split arguments into options for ssh, the VM's name, and the command.

    Raises:
        InvalidRequest: the VM's name is missing, or ssh does not have an option.
    """
    left, options = list(words), []
    while left and left[0].startswith("-") and left[0] != "--":
        word = left.pop(0)
        options.append(word)
        flags = word[1:].lstrip(_SSH_FLAGS)
        if flags and flags[0] not in _SSH_VALUE_OPTIONS:
            raise InvalidRequest(f"ssh has no option {word}")
        if len(flags) == 1:  # its value is the next word
            options += left[:1]
            del left[:1]
    if left[:1] == ["--"]:
        del left[0]
    if not left:
        raise InvalidRequest(
            "the name of a VM is missing",
            hint="`vmjobs cluster show NAME` lists a cluster's VMs",
        )
    vm, command = left[0], left[1:]
    return options, vm, command[1:] if command[:1] == ["--"] else command


@contextmanager
def open_login(vm: str) -> Iterator[list[str]]:
    """Yield options with which OpenSSH reaches the VM, once; then delete the key.

    Raises:
        ConfigError: OpenSSH is not installed.
        VMJobsError: the service, or the VM's node, refuses.
    """
    cluster, dash, number = vm.rpartition("-")
    if not (cluster and dash and number.isdigit()):
        raise InvalidRequest(f"{vm!r} is not the name of a cluster VM", hint="names are like workers-1")
    with tempfile.TemporaryDirectory(prefix="vmjobs-ssh-") as name, client() as api:
        folder = Path(name)
        public = make_key(folder)
        session = api.clusters.open_session(cluster, vm, public)
        try:
            known = f"{session.machine} {session.host_key}\n"
            (folder / KNOWN_HOSTS_FILE).write_text(known, "ascii")
            words = ["cluster", "connect", session.id]
            yield openssh_options(session.machine, session.user, folder, words)
        finally:
            api.clusters.session(session.id).close()


def make_key(folder: Path) -> str:
    """Make a key for one login; return the public key.

    Raises:
        ConfigError: OpenSSH is not installed.
    """
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise ConfigError(f"{program} is not installed", hint="install OpenSSH's client")
    key = folder / KEY_FILE
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], timeout=30)
    return key.with_suffix(".pub").read_text("ascii").strip()


def openssh_options(vm: str, user: str, folder: Path, connect: Sequence[str]) -> list[str]:
    """Return options with which OpenSSH's programs reach a VM without any prompt.

    folder: has the login's key, and the VM's host key by the time that ssh reads it. connect: arguments
    with which this program relays the connection.
    """
    settings = {
        "ProxyCommand": shlex.join([*OWN_COMMAND, *connect]).replace("%", "%%"),
        "User": user,
        "HostKeyAlias": vm,
        "UserKnownHostsFile": _quote_path(folder / KNOWN_HOSTS_FILE),
        "GlobalKnownHostsFile": "none",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "IdentityFile": _quote_path(folder / KEY_FILE),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "PreferredAuthentications": "publickey",
        "BatchMode": "yes",
        "ControlMaster": "no",
        "ControlPath": "none",
        "ConnectTimeout": "30",
        "ServerAliveInterval": "15",
        "LogLevel": "ERROR",
    }
    return [
        "-F",
        "none",
        *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")),
    ]


def _quote_path(path: Path) -> str:
    """Quote a path for OpenSSH's settings: spaces stay, and % is no escape."""
    return '"' + str(path).replace("%", "%%") + '"'


def run_openssh(argv: list[str]) -> int:
    """Run a program in the foreground; return its exit status as a shell does."""
    # The terminal sends its signals to the program too. Signals that end this process are passed on.
    terminal, end = (signal.SIGINT, signal.SIGQUIT), (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*terminal, *end)}
    try:
        process = subprocess.Popen(argv, preexec_fn=_reset_signals)  # noqa: PLW1509 - there are no threads
        for number in end:
            signal.signal(number, lambda number, _frame: process.send_signal(number))
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
