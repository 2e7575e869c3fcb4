"""The same container images under `docker run` and as VM images, compared."""

from __future__ import annotations

import shlex
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from images.oci.fetch import RegistryAccess
from images.oci.importer import import_reference
from images.store.image_store import ImageStore
from tests.kit.container_images import Registry, registry
from tests.kit.grid import run
from tests.kit.image_builds import WORK, Bench, need, vms
from vmjobs.model import HypervisorKind, NetworkMode

__all__ = ["vms"]

BASE = "debian:trixie-slim"

#: Several layers; later ones remove and replace files; another user; links; a setuid program.
ROOTED = f"""
FROM {BASE}
RUN useradd -u 4711 -m -s /bin/bash -G audio,video physicist && groupadd -g 5000 lab
RUN mkdir -p /opt/dir/below && echo old > /opt/dir/below/old && echo x > /opt/gone && echo 1 > /opt/one
RUN ln /opt/one /opt/two && ln -s ../opt/one /opt/pointer && mkfifo /opt/fifo && chmod 711 /opt/fifo
RUN cp /bin/cat /opt/reveal && chmod 4755 /opt/reveal && echo treasure > /opt/secret \\
    && chmod 600 /opt/secret
RUN rm -r /opt/gone /opt/dir && mkdir -m 2750 /opt/dir && echo new > /opt/dir/new \\
    && chown 4711:5000 /opt/dir /opt/dir/new && rm /usr/share/common-licenses/BSD
RUN printf '%s\\n' '#!/bin/bash' 'printf "<%s>" "$@"; echo' 'exec "$@"' > /entry && chmod 755 /entry
ENV GREETING="hello wörld" EMPTY= QUOTED="it's \\"so\\"" PATH=/opt/tools:$PATH
WORKDIR /srv/data
"""
USERS = """
RUN chown physicist /srv/data
USER physicist
ENTRYPOINT ["/entry"]
CMD ["echo", "the default", "$HOME"]
"""
SCRATCH = """
FROM scratch
COPY busybox /bin/busybox
ENV NAME=scratch
ENTRYPOINT ["/bin/busybox"]
CMD ["echo", "nothing", "but  this"]
"""

#: Paths that a container engine or a VM provides itself.
_OWN = (
    *("/.vmjobs", "/.dockerenv", "/proc", "/sys", "/dev", "/tmp", "/var/tmp"),  # noqa: S108
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"),
)
_FIND = rf"find / -xdev \( {' -o '.join(f'-path {path}' for path in _OWN)} \) -prune -o"
#: Commands for a shell in the image, run as root and as the image's user.
COMMANDS = {
    "who": "id; id -G; groups; whoami; echo ~; umask; pwd",
    "environment": "env | grep -v -e ^HOSTNAME= -e ^VMJOBS_ | sort",
    "files": rf"{_FIND} -type f -printf '%m %U:%G %n %s %TY%Tm%Td%TH%TM %p\n' 2>/dev/null | sort",
    "others": rf"{_FIND} ! -type f -printf '%y %m %U:%G %p -> %l\n' 2>/dev/null | sort",
    "bytes": rf"{_FIND} -type f -readable -print0 2>/dev/null | sort -z | xargs -0 cat | sha256sum",
    "setuid": "/opt/reveal /opt/secret; cat /opt/secret",
    "denied": "cat /etc/shadow >/dev/null; echo x > /usr/x; echo $?; ls /opt/dir",
    "places": "stat -c '%F %a' /dev/null /dev/shm /dev/fd /tmp /var/tmp; mktemp -u XX | wc -c",
    "temporary": "f=$(mktemp); echo data > $f; cat $f; rm $f; echo >/dev/shm/x; rm /dev/shm/x",
    "streams": "echo one; echo two >/dev/stdout; echo three >/dev/stderr; cat; ls /proc/self/fd",
    "processes": "cat <(echo a) <(echo b); (sleep 0.1; echo late) & wait; seq 100000 | tail -n 1",
    "interrupted": "trap 'echo caught' INT; kill -INT $$; echo after",
    "missing": "no-such-program",
}


@dataclass(frozen=True)
class Ended:
    """A program's output and its exit status as a shell reports it."""

    out: str
    err: str
    code: int


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The images in docker's own store, by a short name."""
    need("docker", "skopeo", "docker-registry", "busybox")
    if subprocess.run(
        ["docker", "image", "inspect", BASE], capture_output=True, check=False
    ).returncode:
        pytest.fail(f"docker does not run, or has no {BASE}: `make grid` sees to both")
    folder = tmp_path_factory.mktemp("builds")
    (folder / "busybox").write_bytes(Path("/bin/busybox").read_bytes())
    (folder / "busybox").chmod(0o755)
    run_id = uuid.uuid4().hex[:8]
    made = {}
    try:
        for name, text in {"root": ROOTED, "user": ROOTED + USERS, "scratch": SCRATCH}.items():
            file = folder / f"{name}.dockerfile"
            file.write_text(text)
            made[name] = f"vmjobs-test-{run_id}/{name}:1"
            build = ("docker", "build", "--quiet", "--tag", made[name], "--file", str(file))
            own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "DOCKER_BUILDKIT": "0", "HOME": str(folder)}
            run(*build, str(folder), environment=own)
        yield made
    finally:
        run("docker", "image", "rm", *made.values(), check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("images") / "store")


@pytest.fixture(scope="module")
def digests(names: dict[str, str], served: Registry, store: ImageStore) -> dict[str, str]:
    """The same images as VM images, imported from a registry."""
    found = {}
    for name, built in names.items():
        served.copy(f"docker-daemon:{built}", f"docker/{name}", "1")
        reference = f"oci:{served.host}/docker/{name}:1"
        found[name] = import_reference(
            reference, store, WORK, access=RegistryAccess(insecure=True)
        ).digest
    return found


def in_docker(image: str, *words: str, init: bool = False) -> Ended:
    """Run a command by `docker run`, without input and network. init: docker's is process 1."""
    options = ["--rm", "--network", "none", *(["--init"] if init else [])]
    command = ["docker", "run", *options, image, *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    return Ended(done.stdout.decode(), done.stderr.decode(), done.returncode)


def in_vm(vms: Bench, digest: str, *words: str) -> Ended:
    """Run a command in a VM, as a job without a script."""
    guest = vms.start(
        digest,
        "",
        strategy="image",
        arguments=words,
        network=NetworkMode.NONE,
        hypervisor=HypervisorKind.UML,
    ).end()
    assert guest.report.exit is not None, guest.text
    out, err = (sink.getvalue().decode() for sink in (guest.out, guest.err))
    return Ended(out, err, guest.report.exit.shell_code)


@pytest.mark.soak_for("user")
@pytest.mark.parametrize("image", ["root", "user"])
def test_commands_do_the_same(
    names: dict[str, str], digests: dict[str, str], vms: Bench, image: str
) -> None:
    # One VM runs all commands, which is faster; each has its own shell.
    steps = (
        f"echo '== {name}'; bash -c {shlex.quote(text)} 2>&1; echo \"status $?\""
        for name, text in COMMANDS.items()
    )
    words = ("/bin/bash", "-c", "\n".join(steps))
    wanted, found = in_docker(names[image], *words), in_vm(vms, digests[image], *words)
    assert by_command(found.out) == by_command(wanted.out)
    assert found == wanted


def by_command(text: str) -> dict[str, list[str]]:
    """The output of each command, so that a failure shows which one differs."""
    parts = (part.splitlines() for part in text.split("\n== "))
    return {lines[0]: lines[1:] for lines in parts}


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("user", ()),
        ("user", ("printf", "%s|", "a b", "it's", "", "$HOME", "*", "ü", "-n")),
        ("scratch", ()),
        ("scratch", ("no-such-applet",)),
        ("root", ("sh", "-c", "echo $0 $#; exit 200", "a", "b c")),
    ],
)
def test_entry_points_and_arguments(
    names: dict[str, str], digests: dict[str, str], vms: Bench, image: str, words: tuple[str, ...]
) -> None:
    assert in_vm(vms, digests[image], *words) == in_docker(names[image], *words)


@pytest.mark.parametrize("signal", ["KILL", "TERM"])
def test_signals_end_programs_alike(
    names: dict[str, str], digests: dict[str, str], vms: Bench, signal: str
) -> None:
    words = ("sh", "-c", f"kill -{signal} $$; sleep 5")
    assert in_vm(vms, digests["root"], *words) == in_docker(names["root"], *words, init=True)
