"""Container images: references, manifests, configurations, users and packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from images.build.packages import package_versions
from images.build.tree import FileTree
from images.oci.container import (
    ContainerConfig,
    index_digests,
    is_index,
    program_of,
    read_configuration,
    read_manifest,
)
from images.oci.reference import ContainerTransport, is_reference, parse
from images.oci.users import ContainerUser, look_up_user
from vmjobs.errors import ImageRejected, InvalidRequest

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "name", "tag", "digest", "registry", "called"),
    [
        ("oci:debian", "debian", "latest", "", "docker.io", ("debian", "latest")),
        ("oci:debian:12", "debian", "12", "", "docker.io", ("debian", "12")),
        ("docker://r.example/a/b:1", "r.example/a/b", "1", "", "r.example", ("b", "1")),
        ("oci:localhost:5000/x", "localhost:5000/x", "latest", "", "localhost:5000", ("x", "latest")),
        (f"oci:r.example/x@{DIGEST}", "r.example/x", "", DIGEST, "r.example", ("x", "a" * 12)),
        (f"oci:r.example/x:1@{DIGEST}", "r.example/x", "1", DIGEST, "r.example", ("x", "1")),
        ("oci:[::1]:5000/x:v", "[::1]:5000/x", "v", "", "[::1]:5000", ("x", "v")),
    ],
)
def test_references_in_registries(
    text: str, name: str, tag: str, digest: str, registry: str, called: tuple[str, str]
) -> None:
    found = parse(text)
    assert (found.name, found.tag, found.digest, found.registry) == (name, tag, digest, registry)
    assert found.suggested_name == called
    assert is_reference(text)
    assert parse(found.text) == found


def test_references_to_files(tmp_path: Path) -> None:
    (tmp_path / "with:colon").mkdir()
    layout = parse(f"oci-layout:{tmp_path}:v1")
    assert (layout.transport, layout.path, layout.tag) == (ContainerTransport.LAYOUT, tmp_path, "v1")
    assert parse(f"oci-layout:{tmp_path}/with:colon").path == tmp_path / "with:colon"
    assert parse("docker-archive:Saved Image.tar").suggested_name == ("saved-image", "latest")


NO_REFERENCES = [
    "oci:",
    "oci:UPPER",
    "oci:a//b",
    "oci:--help",
    "oci:a:b:c",
    "oci:a@sha256:12",
    "oci:a@md5:1",
    "oci:../x",
    "oci:ü",
    "oci-layout:",
    "generic:1",
]


@pytest.mark.parametrize("text", [*NO_REFERENCES, "oci:a b", "oci:a\n", "oci:" + "a" * 600])
def test_other_words_are_no_references(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)
    assert not is_reference("generic:1")
    assert not is_reference(DIGEST)


BLOB = {"mediaType": "x", "digest": DIGEST, "size": 1}
MANIFEST: dict[str, Any] = {"schemaVersion": 2, "config": BLOB, "layers": [BLOB]}
CONFIG: dict[str, Any] = {
    "architecture": "amd64",
    "os": "linux",
    "config": {},
    "rootfs": {"type": "layers", "diff_ids": [DIGEST]},
}


def configuration(**run: Any) -> ContainerConfig:
    return ContainerConfig.model_validate({**CONFIG, "config": run})


def test_a_manifest_and_its_configuration() -> None:
    manifest = read_manifest(json.dumps(MANIFEST).encode())
    found = read_configuration(json.dumps(CONFIG).encode(), manifest)
    assert found.rootfs.diff_ids == (DIGEST,)


@pytest.mark.parametrize(
    "change",
    [
        {"schemaVersion": 1},
        {"mediaType": "application/vnd.oci.image.index.v1+json"},
        {"config": None},
        {"layers": [{**BLOB, "digest": "sha256:../../etc/passwd"}]},
        {"layers": [{**BLOB, "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"}]},
        {"layers": [BLOB] * 513},
    ],
)
def test_other_manifests_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ImageRejected):
        read_manifest(json.dumps({**MANIFEST, **change}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b" " * (9 << 20)])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(ImageRejected):
        read_manifest(data)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "arm64"},
        {"os": "windows"},
        {"rootfs": {"diff_ids": []}},
        {"rootfs": {"diff_ids": ["x"]}},
        {"config": {"Env": "PATH=/bin"}},
    ],
)
def test_other_configurations_are_refused(change: dict[str, Any]) -> None:
    manifest = read_manifest(json.dumps(MANIFEST).encode())
    with pytest.raises(ImageRejected):
        read_configuration(json.dumps({**CONFIG, **change}).encode(), manifest)


def test_an_index_lists_its_images() -> None:
    index = json.dumps({"schemaVersion": 2, "manifests": [BLOB, {"digest": "sha256:b"}, 7]}).encode()
    assert is_index(index)
    assert index_digests(index) == {DIGEST, "sha256:b"}
    assert not is_index(json.dumps(MANIFEST).encode())


def test_the_program_of_a_container() -> None:
    program, dropped = program_of(
        configuration(
            Entrypoint=["/bin/x", "it's"],
            Cmd=["a b"],
            Env=["PATH=/x", "EMPTY=", "NOTHING", "a=b=c", "odd.name=1"],
            WorkingDir="srv",
            User="app:staff",
        )
    )
    assert (program.arguments, program.command) == (("/bin/x", "it's"), ("a b",))
    assert program.environment == {"PATH": "/x", "EMPTY": "", "NOTHING": "", "a": "b=c"}
    assert dropped == ["odd.name"]
    assert (program.directory, program.user) == ("/srv", "app:staff")
    assert program_of(configuration())[0].directory == "/"


@pytest.mark.parametrize("run", [{"User": "a b"}, {"Entrypoint": ["a\0b"]}, {"Env": ["A=\0"]}])
def test_programs_that_cannot_be_run_are_refused(run: dict[str, Any]) -> None:
    with pytest.raises(ImageRejected):
        program_of(configuration(**run))


PASSWD = """root:x:0:0:root:/root:/bin/bash
# a comment
app:x:1000:100:App:/home/app:/bin/sh
broken
twin:x:1000:200::/twin:
homeless:x:1001:1001:::
"""
GROUP = "root:x:0:root\nusers:x:100:\nlab:x:500:app,other\nvideo:x:44:other,app\n"


@pytest.mark.parametrize(
    ("user", "wanted"),
    [
        ("", ContainerUser(0, 0, (0,), "/root")),
        ("app", ContainerUser(1000, 100, (100, 500, 44), "/home/app")),
        ("1000", ContainerUser(1000, 100, (100, 500, 44), "/home/app")),
        ("app:lab", ContainerUser(1000, 500, (500,), "/home/app")),
        ("app:77", ContainerUser(1000, 77, (77,), "/home/app")),
        ("4321", ContainerUser(4321, 0, (0,), "/")),
        ("4321:lab", ContainerUser(4321, 500, (500,), "/")),
        ("homeless", ContainerUser(1001, 1001, (1001,), "/")),
    ],
)
def test_users_are_looked_up_as_engines_do_it(user: str, wanted: ContainerUser) -> None:
    tree = FileTree()
    tree.add_file("etc/passwd", PASSWD.encode())
    tree.add_file("etc/group", GROUP.encode())
    assert look_up_user(tree, user) == wanted
    assert look_up_user(FileTree(), "") == ContainerUser(), "an image without users"
    assert look_up_user(FileTree(), "5:6") == ContainerUser(5, 6, (6,), "/")


@pytest.mark.parametrize("user", ["nobody-here", "0:nobody-here", "99999999999", "0:99999999999"])
def test_users_that_are_not_there_are_refused(user: str) -> None:
    with pytest.raises(ImageRejected):
        look_up_user(FileTree(), user)


def test_packages_of_debian_of_images_without_dpkg_and_of_alpine() -> None:
    tree = FileTree()
    status = "Package: bash\nStatus: install ok installed\nVersion: 5.2\nDescription: a\n b: c\n\n"
    gone = "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n"
    tree.add_file("var/lib/dpkg/status", (status + gone).encode())
    tree.add_file("var/lib/dpkg/status.d/libc6", b"Package: libc6\nVersion: 2.36\n")
    tree.add_file("lib/apk/db/installed", b"C:x\nP:musl\nV:1.2-r1\n\nP:busybox\nV:1.36\n")
    assert package_versions(tree) == {
        "bash": "5.2",
        "busybox": "1.36",
        "libc6": "2.36",
        "musl": "1.2-r1",
    }
    assert package_versions(FileTree()) == {}
