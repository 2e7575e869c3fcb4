"""The shipped recipes: built by the command, checked by their boot test, used by jobs."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from images.store.image_store import ImageStore
from tests.kit.cli import Done, vmjobs
from tests.kit.image_builds import STORE, need
from tests.kit.waiting import wait_until
from vmjobs.errors import NotFound

BUILD_SECONDS = 900
REALM = "VMJOBS.TEST"


def run(*words: str | Path, state: Path, **more: Any) -> Done:
    """Run the command with the test's own state directory."""
    return vmjobs(*words, image_dir=STORE, state_dir=state, **more)


def build(name: str, state: Path) -> None:
    """Build a recipe; a second call finds it built and tested."""
    need("mmdebstrap")
    done = run("image", "build", name, state=state, timeout=BUILD_SECONDS, code=0)
    assert done.out.startswith(f"{name.rpartition('/')[2].removesuffix('.toml')}:latest sha256:")


def script(folder: Path, text: str) -> Path:
    """A script to run."""
    file = folder / "script"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[[files]]\npath = "/etc/passwd/x"\ntext = ""', ("/etc/passwd, which is not a directory",)),
        ('cmdline = ["init=/no/such/program"]', ("fails its boot test", "panicked")),
    ],
)
def test_what_cannot_be_built_or_fails_its_boot_test_gets_no_name(
    tmp_path: Path, more: str, words: tuple[str, ...]
) -> None:
    recipe = tmp_path / "broken.toml"
    recipe.write_text(f'name = "broken"\nversion = "1"\nlayers = ["generic"]\n{more}\n')
    how = {"timeout": BUILD_SECONDS, "hypervisors": "uml"}
    done = run("image", "build", recipe, state=tmp_path, code=70, **how)
    assert all(word in done.err for word in words), done.err
    with pytest.raises(NotFound):
        ImageStore(STORE).resolve("broken")


def test_a_site_s_own_packages_have_to_be_named(tmp_path: Path) -> None:
    done = run("image", "build", "cvmfs", state=tmp_path, code=64)
    assert "--repository" in done.err


@pytest.mark.soak
def test_root_trees_are_written_and_read(tmp_path: Path) -> None:
    build("root", tmp_path)
    analysis = """#!/usr/bin/python3
import awkward, numpy, uproot
random = numpy.random.default_rng(7)
muons = awkward.unflatten(random.exponential(20.0, 3000), random.multinomial(3000, [0.001] * 1000))
with uproot.recreate("muons.root") as file:
    file.mktree("events", {"pt": "var * float64"})
    file["events"].extend({"pt": muons})
tree = uproot.open("muons.root:events")
back = tree["pt"].array()
print(tree.num_entries, len(awkward.flatten(back)), bool(awkward.all(back == muons)))
"""
    done = run(
        "run", "--image", "root", "--memory", "1024", "--output", "muons.root",
        "--output-dir", tmp_path, script(tmp_path, analysis), state=tmp_path,
    )  # fmt: skip
    assert (done.code, done.out) == (0, "1000 3000 True\n"), done.err
    assert (tmp_path / "muons.root").read_bytes().startswith(b"root")


@pytest.mark.soak
def test_a_worker_has_htcondor_inside(tmp_path: Path) -> None:
    build("worker", tmp_path)
    asked = "condor_version | head -n 1\ncondor_config_val -evaluate 'DAEMON_LIST'\n"
    done = run("run", "--image", "worker", script(tmp_path, asked), state=tmp_path, code=0)
    assert done.out.startswith("$CondorVersion: ")


@dataclass(frozen=True)
class Kdc:
    """The test's own key distribution centre, which guests can reach."""

    address: str
    config: Path
    keytab: Path


@contextmanager
def own_address() -> Iterator[str]:
    """An address of this host that no other program uses, and that leads nowhere else.

    Guests cannot reach the host's loopback; 198.18.0.0/15 is for tests (RFC 2544).
    """
    need("ip")
    number = secrets.randbelow(1 << 16)
    name, address = f"vmj{number:04x}", f"198.18.{number >> 8}.{max(1, number & 0xFF)}"
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", name], check=True)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        yield address
    finally:
        subprocess.run(["ip", "link", "delete", name], check=True)


@pytest.fixture
def kdc(tmp_path: Path) -> Iterator[Kdc]:
    """A running KDC with the principal ``physicist`` and its keytab."""
    need("krb5kdc", "kdb5_util", "kadmin.local")
    folder = tmp_path / "kdc"
    folder.mkdir()
    with own_address() as address:
        config = folder / "krb5.conf"
        config.write_text(
            f"[libdefaults]\ndefault_realm = {REALM}\ndns_lookup_kdc = false\n"
            f"[realms]\n{REALM} = {{\n  kdc = {address}:8888\n}}\n"
        )
        (folder / "kdc.conf").write_text(
            f"[realms]\n{REALM} = {{\n  database_name = {folder}/principal\n"
            f"  key_stash_file = {folder}/stash\n  kdc_listen = {address}:8888\n"
            f"  kdc_tcp_listen = {address}:8888\n}}\n[logging]\nkdc = FILE:{folder}/log\n"
        )
        environment = {
            **os.environ,
            "KRB5_CONFIG": str(config),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
        }

        def call(*words: str) -> None:
            subprocess.run(words, env=environment, check=True, capture_output=True)

        call("kdb5_util", "create", "-s", "-r", REALM, "-P", secrets.token_hex(8))
        call("kadmin.local", "-q", "addprinc -randkey physicist")
        call("kadmin.local", "-q", f"ktadd -k {folder}/keytab physicist")
        with subprocess.Popen(
            ["krb5kdc", "-n", "-P", str(folder / "pid")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                wait_until(lambda: _listens(address), what="the KDC to listen")
                yield Kdc(address, config, folder / "keytab")
                assert process.poll() is None, (folder / "log").read_text()
            finally:
                process.terminate()


def _listens(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, 8888)) == 0


@pytest.mark.soak
def test_a_job_gets_a_kerberos_ticket_from_a_real_kdc(kdc: Kdc, tmp_path: Path) -> None:
    build("kerberos", tmp_path)
    login = "kinit -k -t keytab physicist && klist\n"
    done = run(
        "run", "--image", "kerberos", "--network", "outbound",
        "--input", f"krb5.conf={kdc.config}", "--input", f"keytab={kdc.keytab}",
        "--env", "KRB5_CONFIG=krb5.conf", script(tmp_path, login), state=tmp_path,
        network_allow=kdc.address, code=0,
    )  # fmt: skip
    assert f"Default principal: physicist@{REALM}" in done.out
    assert f"krbtgt/{REALM}@{REALM}" in done.out
