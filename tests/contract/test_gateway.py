"""A real gateway on this host: the commands, User Mode Linux, the image ``generic``."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess

import pytest
import requests

from images.build.builder import build
from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.cli import VMJOBS
from tests.kit.cluster_vm_node import UML
from tests.kit.gateway_site import IMAGES, SECONDS, Site, declaration, site
from tests.kit.hypervisors import host_addresses
from tests.kit.prometheus import scrape
from tests.kit.sockets import free_ports
from tests.kit.waiting import wait_until
from vmjobs.agent.journal import vm_name_prefix
from vmjobs.gateway.control import SupervisorClient

__all__ = ["site"]

SERVICE = """\
gateway: web
domain: test.example
network: 10.77.0.0/24
machines:
  www:
    role: service
    image: generic
    address: 10.77.0.30
    memory: 128
    disk: 64
    publish: [{port}:80]
    run: |
      trap 'echo it ends; exit' TERM
      echo hello >page
      head -c 56M /dev/zero >bulk
      mkdir -p cgi-bin
      printf '#!/bin/sh\\nrm /job/bulk; echo; echo removed\\n' >cgi-bin/remove
      chmod +x cgi-bin/remove
      busybox httpd -f -h . &
      wait
    check: busybox wget -q -O /dev/null http://127.0.0.1/page
"""


def test_a_gateway_lives(site: Site) -> None:
    """Install, boot, connect, kill its supervisor, stop, boot again; then delete."""
    port, other = free_ports(2)
    site.install("one", f", publish: ['{port}:8080', '127.0.0.1:{other}:8081']")
    assert site.states("one") == ["stopped", "stopped"]
    first = site.supervise("one")
    assert len(site.image_tags("one")) == 2
    told = site.do("boot")
    assert "ce: up" in told
    assert "wn: up" in told
    wait_until(lambda: "reached 10.77.0.20" in site.said("one", "ce"), SECONDS, "ce reaches wn")
    wait_until(lambda: "reached 10.77.0.10" in site.said("one", "wn"), SECONDS, "wn reaches ce")
    assert "boot 1 of ce.test.example with the key of one" in site.said("one", "ce")
    tokens = re.compile(r"has token (\d+) of ce")
    wait_until(lambda: len(set(tokens.findall(site.said("one", "ce")))) > 1, SECONDS, "a new token")

    first.kill()
    first.wait()
    assert "no supervisor runs" in site.do("show")
    site.supervise("one")
    site.do("boot")
    assert [m["incarnation"] for m in site.shown("one").values()] == [1, 1], "they were adopted"
    for address in ("127.0.0.1", *host_addresses()[:1]):
        reply = requests.get(f"http://{address}:{port}/host", timeout=SECONDS)
        assert reply.text == "ce.test.example\n", "the port is published, without a supervisor, too"
    with socket.create_server((address, 0)) as closed:
        closed.setblocking(False)
        target = f"{address}:{closed.getsockname()[1]}"
        reply = requests.get(f"http://127.0.0.1:{port}/cgi-bin/connect?{target}", timeout=SECONDS)
        assert "connected" not in reply.text, "no way out from a published port"
        with pytest.raises(BlockingIOError):
            closed.accept()
    assert f"{port}:8080" in site.do("show")
    site.do("validate", "one.yaml")  # its own VM uses the port

    site.do("stop", "wn")
    assert site.states("one") == ["up", "stopped"]
    site.do("boot", "wn")
    said = site.said("one", "wn")
    assert "boot 2 of wn.test.example" in said, "its disk was kept"
    assert "root 1" in said, "and its root disk"
    assert site.shown("one")["ce"]["incarnation"] == 1, "the other was left alone"

    assert "Remove" in site.run("delete").out
    site.do("delete", "--yes")
    assert not site.place("one").directory.exists()
    assert not site.image_tags("one"), "its images need not stay"
    prefix = vm_name_prefix(site.place("one").vms)
    assert not [name for name in UML.list() if name.startswith(prefix)]


def test_a_service_of_any_image_is_checked_published_and_stopped(site: Site) -> None:
    port, metrics = free_ports(2)
    listen = f"127.0.0.1:{metrics}"
    site.program = (VMJOBS, "gateway")
    (site.folder / "web.yaml").write_text(SERVICE.format(port=port) + f"metrics: {listen}\n")
    site.do("install", "web.yaml")
    site.do("boot")
    assert requests.get(f"http://127.0.0.1:{port}/page", timeout=SECONDS).text == "hello\n"
    wait_until(lambda: "% full" in site.shown("web")["www"]["message"], SECONDS, "its disk is full")
    full = site.shown("web")["www"]["used"]
    found = scrape(listen)
    assert found["vmjobs_gateway_vm_state", "up", "www"] == 1
    assert found["vmjobs_gateway_vm_state", "down", "www"] == 0
    assert found["vmjobs_gateway_vm_boots_total", "www"] == 1
    assert found["vmjobs_gateway_vm_data_full_ratio", "www"] >= 0.9
    assert found["vmjobs_gateway_vm_disk_bytes", "www"] == full
    assert "removed" in requests.get(f"http://127.0.0.1:{port}/cgi-bin/remove", timeout=SECONDS).text
    wait_until(lambda: site.shown("web")["www"]["used"] < full / 2, SECONDS, "the host has room again")
    assert "% full" not in site.shown("web")["www"]["message"]
    site.do("stop")
    assert "it ends" in site.said("web", "www")
    assert "the service ended" not in site.said("web", "www")
    site.do("delete", "--yes")


def test_ports_that_cannot_be_published_are_refused(site: Site) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("127.0.0.1", 0)) as third,
    ):
        used, taken = other.getsockname()[1], third.getsockname()[1]
        ports = f"22, '127.0.0.1:{used}:80', '203.0.113.9:2222:22'"
        text = declaration("one", f", publish: [{ports}]") + f"metrics: 127.0.0.1:{taken}\n"
        (site.folder / "one.yaml").write_text(text)
        why = site.refused("validate", "one.yaml")
        (site.folder / "one.yaml").write_text(text.replace(str(taken), str(used)))
        twice = site.refused("validate", "one.yaml")
    assert f"metrics: the port {used} is published for ce" in twice
    assert "one.yaml:5:" in why
    assert "ports below 1024 are for root; publish another one, such as '2022:22'" in why
    for port in (used, taken):
        assert f"another program uses the port 127.0.0.1:{port} of this host" in why
    assert "203.0.113.9 is not an address of this host" in why


def test_a_vm_that_is_declared_no_more_goes_only_where_that_is_said(site: Site) -> None:
    site.install("one")
    disks = {name: site.place("one").disks(name) / "scratch.disk" for name in ("ce", "wn")}
    both = (site.folder / "one.yaml").read_text()
    (site.folder / "one.yaml").write_text("".join(both.splitlines(keepends=True)[:-1]))
    said = site.refused("install", "one.yaml")
    assert "one.yaml does not declare wn, whose data would be lost" in said
    assert "--remove wn" in said
    assert "declares ce" in site.refused("install", "one.yaml", "--remove", "ce")
    assert disks["wn"].exists()
    assert list(site.shown("one")) == ["ce", "wn"]

    site.do("install", "one.yaml", "--remove", "wn")
    assert list(site.shown("one")) == ["ce"]
    assert not disks["wn"].parent.exists()
    assert disks["ce"].exists()
    (site.folder / "one.yaml").write_text(both)
    site.do("install", "one.yaml")
    assert disks["wn"].exists(), "it may come back, with nothing of before"


def test_disks_are_where_the_declaration_places_them(site: Site) -> None:
    big = site.folder / "big"
    (site.folder / "one.yaml").write_text(declaration("one", f", place: {big}"))
    assert f"{big} is not a directory that you may write to" in site.refused("install", "one.yaml")
    big.mkdir()
    site.do("install", "one.yaml")
    site.supervise("one")
    site.do("boot", "ce")
    [disks] = big.iterdir()
    assert {file.suffix for file in disks.iterdir()} == {".overlay", ".made", ".disk"}
    (site.folder / "one.yaml").write_text(declaration("one", f", place: {site.folder}"))
    assert f"machines.ce.place: its disks are in {big}" in site.refused("validate", "one.yaml")
    site.do("backup", "one.tar.zst", "--no-images")
    site.do("restore", "one.tar.zst", "--name", "copy")
    assert len(list(big.iterdir())) == 1, "a restored gateway has its disks in its own directory"
    site.do("delete", "--yes", "--gateway", "one")
    assert not list(big.iterdir())


def test_an_upgrade_takes_the_image_as_it_is_now_and_keeps_the_data(site: Site) -> None:
    """Its disk grows with the declaration, and never shrinks."""
    store, tag = ImageStore(IMAGES), f"now-{os.getpid()}"
    old, new = store.resolve("generic"), build("hep", store, ROOT / "build" / "work").digest
    (site.folder / "one.yaml").write_text(
        declaration("one").replace("worker, image: generic", f"worker, image: upgraded:{tag}")
    )
    try:
        store.tag("upgraded", tag, old)
        site.do("install", "one.yaml")
        supervisor = site.supervise("one")
        site.do("boot", "wn")
        site.do("stop", "wn")
        supervisor.kill()
        supervisor.wait()
        store.tag("upgraded", tag, new)
        assert f"image {old}" in site.do("install", "one.yaml"), "it keeps what it was installed with"
        text = (site.folder / "one.yaml").read_text()
        (site.folder / "one.yaml").write_text(text.replace("disk: 64}", "disk: 160}"))
        assert f"image {new}" in site.do("install", "one.yaml", "--upgrade")
    finally:
        store.untag("upgraded", tag)
    site.supervise("one")
    site.do("boot", "wn")
    said = site.said("one", "wn")
    assert "boot 2 of wn.test.example" in said, "its data was kept"
    assert "root fresh" in said, "and its root disk is the new image's"
    assert int(re.findall(r"room +([0-9]+)", said)[-1]) > 128, "its disk has grown"
    (site.folder / "one.yaml").write_text(text)
    assert "the disk of wn has 160 MiB and cannot shrink" in site.refused("install", "one.yaml")
    assert [tag.split("-")[0] for tag in site.image_tags("one")] == ["ce", "wn"]
    site.do("delete", "--yes")


def test_a_vm_is_upgraded_while_others_run_and_gets_its_old_image_back_if_it_is_not_up(
    site: Site,
) -> None:
    store, tag = ImageStore(IMAGES), f"now-{os.getpid()}"
    old, new = store.resolve("generic"), build("hep", store, ROOT / "build" / "work").digest
    broken = store.put_manifest(store.manifest(old).model_copy(update={"architecture": "aarch64"}))
    (site.folder / "one.yaml").write_text(
        declaration("one").replace("worker, image: generic", f"worker, image: upgraded:{tag}")
    )
    try:
        store.tag("upgraded", tag, old)
        site.do("install", "one.yaml")
        site.supervise("one")
        site.do("boot")
        assert "wn: has the current image" in site.do("upgrade")
        store.tag("upgraded", tag, new)
        assert f"wn: image {new}" in site.do("upgrade")
        assert "root fresh" in site.said("one", "wn")
        store.tag("upgraded", tag, broken)
        why = site.refused("upgrade", "wn", "--timeout", f"{SECONDS:.0f}")
    finally:
        store.untag("upgraded", tag)
        store.remove_manifest(broken)
    assert f"wn is not up with its new image {broken}" in why
    assert "it has its old image again, and is up" in why
    said = site.said("one", "wn")
    assert "boot 3 of wn.test.example" in said, "its data was kept"
    assert "root 2" in said, "and its root disk, of the image that it has"
    assert site.shown("one")["wn"]["image"] == new
    assert site.shown("one")["ce"]["incarnation"] == 1, "the other was left alone"
    assert len(site.image_tags("one")) == 2
    site.do("delete", "--yes")


@pytest.mark.soak
def test_two_gateways_of_the_same_addresses_do_not_meet(site: Site) -> None:
    for name in ("one", "two"):
        site.install(name)
        site.supervise(name)
        site.do("boot", "--gateway", name)
    assert "several gateways: one, two" in site.refused("boot")
    site.do("stop", "wn", "--gateway", "one")
    site.do("stop", "ce", "--gateway", "one")
    site.do("boot", "ce", "--gateway", "one")
    wait_until(lambda: "no answer from 10.77.0.20" in site.said("one", "ce"), SECONDS, "ce asks")
    assert "reached" not in site.said("one", "ce"), "the other gateway's machine has that address"


@pytest.mark.soak
def test_a_backup_while_it_runs_is_restored_under_another_name(site: Site) -> None:
    site.install("one")
    supervisor = site.supervise("one")
    site.do("boot")
    told = site.do("backup", "b.tar.zst")
    assert re.search(r"frozen for [0-9.]+ s: ce, wn", told), told
    copy = site.folder / "b.tar.zst"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert site.states("one") == ["up", "up"]
    assert [m["incarnation"] for m in site.shown("one").values()] == [1, 1]
    assert "exists already" in site.refused("restore", "b.tar.zst")

    site.do("restore", "b.tar.zst", "--name", "copy")
    scratch = site.place("copy").disks("ce") / "scratch.disk"
    assert scratch.stat().st_size == 64 * 1024 * 1024
    assert scratch.stat().st_blocks * 512 < 32 * 1024 * 1024, "holes are holes"
    site.supervise("copy")
    site.do("boot", "--gateway", "copy")
    said = site.said("copy", "ce")
    assert "boot 2 of ce.test.example with the key of one" in said
    assert "root 1" in said
    assert [m["incarnation"] for m in site.shown("one").values()] == [1, 1]

    # A killed backup leaves the old one, and the VMs go on.
    before = copy.read_bytes()
    part = site.folder / ".b.tar.zst.part"
    site.kill_at(part, "backup", "b.tar.zst", "--gateway", "one")
    assert copy.read_bytes() == before
    # The client that froze them may die.
    with SupervisorClient(site.place("one").control) as control:
        assert control.ask("freeze")["frozen"] == ["ce", "wn"]
        thawed = site.said("one", "ce").count("thawed")
    wait_until(lambda: site.said("one", "ce").count("thawed") > thawed, SECONDS, "they go on")
    assert site.states("one") == ["up", "up"]
    assert supervisor.poll() is None
    site.do("backup", "b.tar.zst", "--gateway", "one")
    assert not part.exists()

    # A killed restore leaves nothing of that name; the next one starts anew.
    arriving = site.folder / "state" / "gateways" / ".third.restoring"
    site.kill_at(arriving, "restore", "b.tar.zst", "--name", "third")
    assert not site.place("third").directory.exists()
    site.do("restore", "b.tar.zst", "--name", "third")
    assert not arriving.exists()
    assert site.states("third") == ["stopped", "stopped"]


@pytest.mark.soak
def test_a_backup_is_all_that_another_computer_needs(site: Site) -> None:
    site.install("one")
    site.supervise("one")
    site.do("boot")
    site.do("stop")
    site.do("backup", "b.tar.zst")
    folder = site.folder / "elsewhere"
    folder.mkdir()
    elsewhere = Site(folder, site.supervisors, folder / "images")
    elsewhere.do("restore", str(site.folder / "b.tar.zst"))
    assert len(elsewhere.image_tags("one")) == 2
    elsewhere.supervise("one")
    elsewhere.do("boot")
    assert "boot 2 of ce.test.example with the key of one" in elsewhere.said("one", "ce")
    assert "root 1" in elsewhere.said("one", "ce")


def test_systemd_starts_it_with_the_host(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    units = site.folder / "of 100% me"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(units))
    site.install("one")
    for _ in range(2):
        site.do("enable", "--user")
    [unit] = units.glob("systemd/user/*.service")
    assert unit.with_name("default.target.wants").joinpath(unit.name).resolve() == unit
    [command] = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(command.removeprefix("ExecStart=").replace("%%", "%"))
    site.supervisors.append(subprocess.Popen(words, env=site.environment))
    wait_until(lambda: "a supervisor runs" in site.do("show"), SECONDS, "a supervisor")
    other = site.folder / "other"
    site.do("install", "one.yaml", "--state-dir", str(other))
    assert "in another directory" in site.refused("enable", "--user", "--state-dir", str(other))
    site.do("delete", "--yes", "--state-dir", str(other))
    site.do("disable")
    assert not [file for file in units.rglob("*") if not file.is_dir()]
