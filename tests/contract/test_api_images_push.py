"""``vmjobs image push`` and ``pull`` with a service in other processes, some killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.tokens import USER_SCOPES, Scope
from images.content import CHUNK_BYTES, SEGMENT_BYTES
from tests.kit.cli import Run
from tests.kit.counting_proxy import Proxy, proxy_to
from tests.kit.processes import children, running
from tests.kit.workstation import Workstation, alone, make_workstation
from vmjobs.config import Config
from vmjobs.model import MIB


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return alone(tmp_path_factory.mktemp("service"), api_workers=2)


@pytest.fixture(scope="module")
def service(config: Config) -> Iterator[None]:
    with running(config, config.data_dir.parent / "log"):
        yield


@pytest.fixture
def proxy(config: Config, service: None) -> Iterator[Proxy]:
    with proxy_to(config.listen) as made:
        yield made


@pytest.fixture
def desk(config: Config, proxy: Proxy, tmp_path: Path, typed: Run) -> Workstation:
    """A new user behind the proxy."""
    return make_workstation(config, proxy.url, tmp_path, typed=typed)


def disk(path: Path, size: int, seed: int = 1) -> Path:
    """A file whose ends look like a disk without a known format; random in between."""
    with path.open("wb") as file:
        file.seek(MIB)
        file.write(random.Random(f"{seed}{path}").randbytes(size - MIB))
    return path


RAW = ("--format", "raw", "--boot", "kernel")


def test_there_and_back(desk: Workstation, tmp_path: Path, proxy: Proxy) -> None:
    file = disk(tmp_path / "muons.img", 20 * MIB + 12345)
    with file.open("r+b") as sink:
        sink.truncate(200 * MIB)  # most of it is a hole
    pushed = desk.json("push", file, *RAW)
    assert pushed["bytes"] == 200 * MIB
    assert 19 * MIB < pushed["sent"] < 21 * MIB
    assert pushed["sent"] < proxy.up < pushed["sent"] + MIB
    assert pushed["image"]["tags"][0]["name"] == "muons"
    assert pushed["image"]["origin"]["file"] == "muons.img"
    target = tmp_path / "back.img"
    desk.run("pull", "muons", target)
    assert subprocess.run(["cmp", file, target], check=False).returncode == 0
    assert target.stat().st_blocks * 512 < 25 * MIB
    assert "exists already" in desk.run("pull", "muons", target, code=64)
    desk.run("pull", "muons")
    (entry, *_) = desk.json("list", "--local")
    assert entry["digest"] == pushed["image"]["digest"]
    assert desk.json("verify", "--local")[0]["damaged"] == []
    assert desk.json("verify", "muons")[0]["damaged"] == []
    with file.open("r+b") as sink:
        for place in (5 * MIB, 12 * MIB, 17 * MIB):
            sink.seek(place)
            sink.write(os.urandom(CHUNK_BYTES))
    assert 0 < desk.json("push", file, "muons:2", *RAW)["sent"] < 3 * CHUNK_BYTES + 64 * 1024


def test_another_format_is_the_same_image(desk: Workstation, tmp_path: Path) -> None:
    file = disk(tmp_path / "a.img", 9 * MIB)
    raw = desk.json("push", file, "x:raw", *RAW)["image"]["digest"]
    other = tmp_path / "a.qcow2"
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", "-c", file, other], check=True)
    pushed = desk.json("push", other, "x:qcow2", "--boot", "kernel")
    assert (pushed["image"]["digest"], pushed["sent"]) == (raw, 0)
    desk.run("pull", "x:raw", tmp_path / "b.vmdk", "--format", "vmdk")
    compare = ["qemu-img", "compare", "-f", "raw", "-F", "vmdk", file, tmp_path / "b.vmdk"]
    assert subprocess.run(compare, check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_kernel_and_initrd_go_along(desk: Workstation, tmp_path: Path) -> None:
    file = disk(tmp_path / "root.img", 2 * MIB)
    (tmp_path / "vmlinuz").write_bytes(b"kernel" * 1000)
    (tmp_path / "initrd").write_bytes(b"initrd" * 1000)
    how = ("--kernel", tmp_path / "vmlinuz", "--initrd", tmp_path / "initrd")
    words = ("--append", "init=/sbin/x quiet", "--partition", "2", "--guest", "--cloud-init")
    shown = desk.json("push", file, "k", "--format", "raw", *how, *words)["image"]["manifest"]
    assert (shown["cmdline"], shown["partition"]) == (["init=/sbin/x", "quiet"], 2)
    assert (shown["boot"], shown["cloud_init"], bool(shown["guest"])) == ("kernel", True, True)
    desk.run("pull", "k", tmp_path / "back.img")
    assert (tmp_path / "back.img.kernel").read_bytes() == b"kernel" * 1000
    assert (tmp_path / "back.img.initrd").read_bytes() == b"initrd" * 1000
    assert "kernel" in desk.run("push", file, "k", "--format", "raw", "--boot", "bios", *how, code=64)


def test_names_on_the_command_line(desk: Workstation, config: Config, tmp_path: Path) -> None:
    file = disk(tmp_path / "a.img", 2 * MIB)
    digest = desk.json("push", file, "a", *RAW)["image"]["digest"]
    desk.run("tag", "a", "b:v1")
    assert not desk.json("rm", "a")[0]["removed"]
    assert desk.json("show", "b:v1")["digest"] == digest
    friend = make_workstation(
        config, desk.url, tmp_path / "friend", typed=desk.typed, groups=["/atlas"]
    )
    friend.run("show", digest, code=66)
    desk.run("share", "b:v1", "group:/atlas")
    assert friend.json("show", digest)["digest"] == digest
    desk.run("deprecate", "b:v1", "use c")
    assert digest not in desk.run("list")
    assert digest in desk.run("list", "--all")
    assert desk.json("rm", "b:v1")[0]["removed"]
    desk.run("show", digest, code=66)
    desk.run("push", file, "x", "--namespace", "library", *RAW, code=77)
    desk.run("push", file, "../x", *RAW, code=64)
    desk.run("gc", code=77)
    rights = USER_SCOPES | {Scope.ADMIN}
    root = make_workstation(config, desk.url, tmp_path / "root", "root", desk.typed, scopes=rights)
    assert root.json("gc", "--dry-run")["segments"] >= 0
    root.run("push", file, "x", "--namespace", "library", "--public", *RAW)
    assert desk.json("show", "library/x")["owner"] == "library"
    root.run("rm", "library/x")
    root.run("gc")


def test_names_are_completed(desk: Workstation, tmp_path: Path) -> None:
    desk.run("push", disk(tmp_path / "a.img", 2 * MIB), "muons:v1", *RAW)
    words = {"COMP_WORDS": "vmjobs image show muo", "COMP_CWORD": "3"}
    environ = {**desk.environ(), **words, "_VMJOBS_COMPLETE": "bash_complete"}
    # A shell's user would not wait as long as this test does on a busy host.
    patience = "from vmjobs.cli import common; common.completion_retries = lambda: None"
    program = f"{patience}; from vmjobs.cli.main import cli; cli.main(prog_name='vmjobs')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["plain,muons:v1"]


def test_a_service_with_a_quota_that_takes_signed_images_only(tmp_path: Path, typed: Run) -> None:
    trusted, key = tmp_path / "trusted", tmp_path / "key"
    trusted.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "key.pub").rename(trusted / "release.pub")
    config = alone(tmp_path, image_trust_dir=trusted, image_quota=16)
    with running(config, tmp_path / "log"):
        desk = make_workstation(config, f"http://{config.listen}", tmp_path, typed=typed)
        said = desk.run("push", disk(tmp_path / "large.img", 40 * MIB), "a", *RAW, code=65)
        assert "QUOTA_EXCEEDED" in said
        assert "16 MiB" in said
        file = disk(tmp_path / "a.img", 2 * MIB)
        assert "IMAGE_REJECTED" in desk.run("push", file, "a", *RAW, code=65)
        desk.run("push", file, "a", "--sign", key, *RAW)
        assert desk.json("show", "a")["signers"] == ["release"]
        assert "cannot read" in desk.run("push", file, "b", "--sign", tmp_path / "none", *RAW, code=64)


def test_bad_files_are_refused_before_anything_is_sent(
    desk: Workstation, proxy: Proxy, tmp_path: Path
) -> None:
    for name, data, word in (
        ("empty", b"", "empty"),
        ("text", b"#!/bin/sh\necho hello\n" * 1000, ""),
        ("truncated.qcow2", b"QFI\xfb\0\0\0\3", ""),
        ("renamed.raw", b"QFI\xfb\0\0\0\3" + bytes(1000), ""),
        ("gzip.img", b"\x1f\x8b\x08\0" + bytes(4096), ""),
    ):
        (tmp_path / name).write_bytes(data)
        said = desk.run("push", tmp_path / name, "x", code=65)
        assert "IMAGE_REJECTED" in said
        assert word in said
    assert proxy.up == 0


def test_files_that_are_none(desk: Workstation, tmp_path: Path) -> None:
    desk.run("push", tmp_path, "x", code=64)
    desk.run("push", tmp_path / "nothing", "x", code=64)
    desk.run("push", "nothing-of-that-name", code=66)
    os.mkfifo(tmp_path / "pipe")
    desk.run("push", tmp_path / "pipe", "x", code=64)


def kill_halfway(desk: Workstation, proxy: Proxy, *words: str | Path) -> None:
    """Run a command, and kill it when 64 MiB have passed."""
    passed = proxy.up + proxy.down
    proxy.hold_after(64 * MIB)
    process = desk.start(*words)
    proxy.wait_for(passed + 64 * MIB, 240)
    process.kill()
    process.communicate(timeout=60)
    proxy.hold_after(None)


def test_a_killed_push_and_a_killed_pull_go_on(desk: Workstation, proxy: Proxy, tmp_path: Path) -> None:
    size = 96 * MIB
    file, target = disk(tmp_path / "big.img", size), tmp_path / "back.img"
    kill_halfway(desk, proxy, "push", file, "big", *RAW)
    before = proxy.up
    pushed = desk.json("push", file, "big", *RAW)
    # Four segments were in transit when it was killed; all earlier ones are stored.
    assert proxy.up - before < size - 64 * MIB + 5 * SEGMENT_BYTES
    # It resumed the same upload, which has ended; no record of it is left.
    assert not list((tmp_path / "cache").rglob("*.upload"))
    assert desk.json("push", file, "big", *RAW)["sent"] == 0
    assert pushed["image"]["size"] == size
    kill_halfway(desk, proxy, "pull", "big", target)
    assert not target.exists()
    before = proxy.down
    desk.run("pull", "big", target)
    assert proxy.down - before < size - 64 * MIB + 6 * SEGMENT_BYTES
    assert subprocess.run(["cmp", file, target], check=False).returncode == 0
    assert not list(tmp_path.glob(".back.img*"))


def test_a_push_outlives_the_service(tmp_path: Path, typed: Run) -> None:
    config = alone(tmp_path, api_workers=2)
    file = disk(tmp_path / "big.img", 32 * MIB)
    with proxy_to(config.listen) as proxy:
        desk = make_workstation(config, proxy.url, tmp_path, typed=typed)
        with running(config, tmp_path / "log") as process:
            proxy.hold_after(12 * MIB)
            push = desk.start("push", file, "big", "--json", *RAW)
            proxy.wait_for(12 * MIB, 240)
            for pid in [process.pid, *children(process)]:
                os.kill(pid, signal.SIGKILL)
            process.wait(60)
        proxy.hold_after(None)
        with running(config, tmp_path / "log2"):
            out, said = push.communicate(timeout=300)
            assert push.returncode == 0, said
            assert json.loads(out)["image"]["size"] == 32 * MIB
            desk.run("pull", "big", tmp_path / "back.img")
    assert subprocess.run(["cmp", file, tmp_path / "back.img"], check=False).returncode == 0
