"""Container images in VMs: programs, users, scripts, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from images.oci.importer import ImportedImage
from images.store.image_store import ImageStore
from tests.kit.container_images import Layer, gzipped, zstded
from tests.kit.container_imports import Made, busybox, from_scratch, run
from tests.kit.image_builds import Bench, fsck
from vmjobs.model import HypervisorKind, NetworkMode, ReasonCode

pytest_plugins = ["tests.kit.container_imports", "tests.kit.image_builds"]


def test_a_program_and_nothing_else(store: ImageStore, made: Made, vms: Bench) -> None:
    image = made(
        [from_scratch()], {"Entrypoint": ["/busybox"], "Cmd": ["echo", "hello  world", "$HOME"]}
    )
    check(store, image)
    guest = run(vms, image, network=NetworkMode.REPOSITORY)
    assert guest.out.getvalue() == b"hello  world $HOME\n", guest.text
    assert guest.exit == {"code": 0}
    guest = run(vms, image, script="#!/busybox sh\n/busybox id\n/busybox ls -A /\nkill -9 $$\n")
    assert guest.exit == {"signal": 9}, guest.text
    identity, *seen = guest.out.getvalue().decode().splitlines()
    assert identity == "uid=0 gid=0 groups=0"
    assert set(seen) == {".vmjobs", "busybox", "dev", "etc", "proc", "sys"}


def check(store: ImageStore, image: ImportedImage) -> None:
    """Check the root disk with e2fsck. A container's disk needs no lost+found."""
    disk = store.folder.verify(store.manifest(image.digest).root.digest)
    assert all("lost+found" in line for line in fsck(disk))


def test_an_image_cannot_bring_a_guest_program_of_its_own(made: Made, vms: Bench) -> None:
    layers = [
        from_scratch().file(".vmjobs/init", "#!/busybox sh\necho mine\n", 0o755),
        Layer()
        .without(".vmjobs")
        .symlink(".vmjobs", "/etc")
        .file("proc/left", "x")
        .symlink("sys", "dev"),
    ]
    image = made(layers, {"Cmd": ["/busybox", "ls", "-A", "/.vmjobs/job", "/etc"]})
    guest = run(vms, image)
    assert guest.exit == {"code": 0}, guest.text
    assert "init" not in guest.out.getvalue().decode()


PASSWD = "root:x:0:0::/root:/bin/sh\napp:x:1234:100::/home/app:/bin/sh\n"
TOOLS = ("sh", "id", "env", "cat", "ls", "stat", "sleep", "pwd", "echo", "sort", "kill", "touch")


def small_system(pack: Any = gzipped) -> Layer:
    """A shell with a few tools, and users."""
    layer = Layer(pack=pack).folder("bin").file("bin/busybox", busybox(), 0o755)
    for tool in TOOLS:
        layer.link(f"bin/{tool}", "bin/busybox")
    layer.file("etc/passwd", PASSWD).file("etc/group", "root:x:0:\nusers:x:100:\nlab:x:77:app\n")
    return layer.folder("tmp", 0o1777).folder("home/app", uid=1234, gid=100)


def test_layers_users_and_permissions(store: ImageStore, made: Made, vms: Bench) -> None:
    below = small_system().file("opt/gone", "x").file("opt/dir/old", "x").file("opt/kept", "kept")
    above = Layer(pack=zstded).without("opt/gone").opaque("opt/dir").file("opt/dir/new", "new")
    above.file("opt/suid", busybox(), 0o4755).file("opt/secret", "s", 0o600).link(
        "opt/hard", "opt/kept"
    )
    above.file("opt/mine", "m", 0o640, uid=1234, gid=77)
    image = made(
        [below, above],
        {
            "Entrypoint": ["/bin/sh", "-c"],
            "Cmd": ["id; pwd; cat /opt/secret; cat /opt/dir/new; stat -c '%a %u %g %h %n' /opt/*"],
            "User": "app",
            "WorkingDir": "/data/made/for/it",
            "Env": ["COLOUR=dark blue"],
        },
    )
    check(store, image)
    guest = run(vms, image)
    assert guest.out.getvalue().decode().splitlines() == [
        "uid=1234(app) gid=100(users) groups=77(lab),100(users)",
        "/data/made/for/it",
        "new755 0 0 2 /opt/dir",
        "644 0 0 2 /opt/hard",
        "644 0 0 2 /opt/kept",
        "640 1234 77 1 /opt/mine",
        "600 0 0 1 /opt/secret",
        "4755 0 0 1 /opt/suid",
    ], guest.text
    assert b"Permission denied" in guest.err.getvalue()


def test_inputs_and_outputs_of_a_program_are_in_its_directory(made: Made, vms: Bench) -> None:
    config = {
        "Entrypoint": ["/bin/sh", "-c", 'cat in/x.txt >>found.txt; echo "$@" >>found.txt; id -u', "sh"],
        "Cmd": ["nothing"],
        "User": "1234",
        "WorkingDir": "/home/app",
    }
    image = made([small_system()], config)
    inputs, outputs = {"in/x.txt": b"input\n"}, ("*.txt", "in/*")
    guest = run(vms, image, inputs=inputs, arguments=("a b", "c"), outputs=outputs)
    assert guest.out.getvalue() == b"1234\n", guest.text
    found = {"found.txt": b"input\na b c\n", "in/x.txt": b"input\n"}
    assert guest.outputs == found, (guest.report, guest.text)


def test_a_script_runs_in_the_container(made: Made, vms: Bench) -> None:
    config = {"User": "app", "Env": ["PATH=/opt/bin:/bin", "lib=x", "run=y", "IFS=z"], "Cmd": ["never"]}
    layer = small_system().file("opt/bin/tool", "#!/bin/sh\necho tool of the image\n", 0o755)
    image = made([layer], config)
    script = """#!/bin/sh
tool; id; pwd; cat in.txt; echo "$1" >out.txt; touch /tmp/mine; echo "$lib $run $HOME"
echo again >/dev/stdout; env | sort | cat >env.txt
trap 'exit 9' INT; kill -INT $$; exit 1
"""
    guest = run(
        vms,
        image,
        network=NetworkMode.REPOSITORY,
        script=script,
        strategy="script",
        inputs={"in.txt": b"input\n"},
        arguments=("it's",),
        environment={"MINE": "1"},
        outputs=("*.txt",),
    )
    assert guest.exit == {"code": 9}, guest.text
    assert guest.out.getvalue().decode().splitlines() == [
        "tool of the image",
        "uid=1234(app) gid=100(users) groups=77(lab),100(users)",
        "/.vmjobs/job/work",
        "input",
        "x y /home/app",
        "again",
    ]
    assert guest.outputs["out.txt"] == b"it's\n"
    assert b"MINE=1\n" in guest.outputs["env.txt"]
    assert b"TOKEN" not in guest.outputs["env.txt"]


def test_signals_reach_the_program_and_its_output_arrives_at_once(made: Made, vms: Bench) -> None:
    command = "trap 'echo caught; exit 137' TERM; echo up; while :; do sleep 1; done"
    image = made([small_system()], {"Cmd": ["/bin/sh", "-c", command]})
    guest = vms.start(image.digest, "", strategy="image")
    guest.out.wait_for(b"up\n")
    guest.run.guest_session.send_signal(15)
    guest.end()
    assert guest.exit == {"code": 137}, guest.text
    assert guest.out.getvalue() == b"up\ncaught\n"


@pytest.mark.parametrize(
    ("config", "exit_code"),
    [
        ({"Cmd": ["/no/such/program"]}, 127),
        ({"Cmd": ["/etc/passwd"]}, 126),
        ({}, 127),
    ],
)
def test_how_programs_end(made: Made, vms: Bench, config: dict[str, Any], exit_code: int) -> None:
    guest = run(vms, made([small_system()], config))
    assert guest.exit == {"code": exit_code}, guest.text
    assert guest.report.reason.code is ReasonCode.SCRIPT_FAILED


def test_qemu_boots_the_same_image(made: Made, vms: Bench) -> None:
    image = made([from_scratch()], {"Cmd": ["/busybox", "uname", "-r"]})
    guest = run(vms, image, hypervisor=HypervisorKind.QEMU)
    assert guest.exit == {"code": 0}, guest.text
    assert b"cloud" in guest.out.getvalue()
