"""Container images from a real registry, made into VM images."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from images.content import CHUNK_BYTES, iter_segments, zero_chunk_digest
from images.oci.fetch import RegistryAccess
from images.oci.importer import ImportedImage
from images.store.image_store import ImageStore
from tests.kit.cli import vmjobs
from tests.kit.container_images import (
    PASSWORD,
    USER,
    Layer,
    Registry,
    plain,
    registry,
    write_layout,
    zstded,
)
from tests.kit.container_imports import OPEN, Made, from_scratch, imported, workdir
from vmjobs.errors import (
    DigestMismatch,
    ImageRejected,
    NotFound,
    Unauthenticated,
    Unavailable,
    VMJobsError,
)

pytest_plugins = ["tests.kit.container_imports", "tests.kit.image_builds"]


@pytest.fixture(scope="module")
def open_registry(place: Path) -> Iterator[Registry]:
    with registry(place / "open") as running:
        yield running


@pytest.fixture(scope="module")
def private_registry(place: Path) -> Iterator[Registry]:
    with registry(place / "private", private=True) as running:
        yield running


def published(running: Registry, folder: Path, name: str, layer: Layer, **config: Any) -> str:
    """Push a container of one layer to a registry; return its reference."""
    write_layout(folder / "layout", [layer], config)
    running.push(folder / "layout", name)
    return f"oci:{running.host}/{name}"


def test_a_tag_is_what_it_means_now_and_a_digest_for_ever(
    tmp_path: Path, open_registry: Registry, store: ImageStore
) -> None:
    first = write_layout(tmp_path / "1", [from_scratch()], {"Cmd": ["/busybox", "true"]})
    write_layout(tmp_path / "2", [from_scratch()], {"Cmd": ["/busybox", "false"]})
    reference = f"oci:{open_registry.host}/team/tagged"
    open_registry.push(tmp_path / "1", "team/tagged", "v1")
    one = imported(f"{reference}:v1", store)
    assert (one.name, one.tag) == ("tagged", "v1")
    assert one.source == f"{reference}:v1@{first}"
    assert store.resolve("tagged:v1") == one.digest

    steps: list[str] = []
    again = imported(
        f"docker://{open_registry.host}/team/tagged:v1", store, progress=lambda s, _: steps.append(s)
    )
    assert again.digest == one.digest
    assert "fetch layers" not in steps

    open_registry.push(tmp_path / "2", "team/tagged", "v1")
    two = imported(f"{reference}:v1", store)
    assert two.digest != one.digest
    assert store.manifest(two.digest).root != store.manifest(one.digest).root
    assert imported(f"{reference}@{first}", store, name="pinned").digest == one.digest
    assert imported(f"{reference}:v1@{first}", store).digest == one.digest
    assert store.resolve("pinned") == one.digest


def test_the_same_container_is_the_same_image_everywhere(
    tmp_path: Path, open_registry: Registry, store: ImageStore
) -> None:
    layers = [from_scratch(), Layer(pack=zstded).file("a", "1"), Layer(pack=plain).file("b", "2")]
    digest = write_layout(tmp_path / "layout", layers)
    open_registry.push(tmp_path / "layout", "same")
    one = imported(f"oci:{open_registry.host}/same", store)
    two = imported(f"oci-layout:{tmp_path}/layout", ImageStore(tmp_path / "other"))
    assert one.digest == two.digest
    assert one.source.endswith(digest)


def test_images_on_the_same_layers_share_their_blocks(tmp_path: Path, store: ImageStore) -> None:
    base = Layer()
    for number in range(300):
        data = (b"%d " % number) * (997 * (1 + number % 20))
        base.file(f"usr/lib/part{number % 17}/file{number}", data)
    shared = []
    for name in ("one", "two"):
        own = Layer().file(f"opt/{name}", os.urandom(300_000)).without("usr/lib/part3/file3")
        write_layout(tmp_path / name, [base, own])
        image = imported(f"oci-layout:{tmp_path}/{name}", store)
        shared.append(blocks(store, image))
    common = sum(digest in set(shared[1]) for digest in shared[0])
    # The 300 kB of the image's own layer, and metadata.
    assert len(shared[0]) - common <= 300_000 // CHUNK_BYTES + 1 + 6
    assert common / len(shared[0]) > 0.9


def blocks(store: ImageStore, image: ImportedImage) -> list[bytes]:
    """Digests of the chunks of the root disk that are not zeros."""
    path = store.folder.verify(store.manifest(image.digest).root.digest)
    with path.open("rb", buffering=0) as file:
        found = [digests or [] for _, digests in iter_segments(file, path.stat().st_size)]
    return [digest for digests in found for digest in digests if digest != zero_chunk_digest()]


def test_one_of_several_architectures_is_taken(
    tmp_path: Path, open_registry: Registry, store: ImageStore
) -> None:
    layout = tmp_path / "layout"
    digests = {
        name: write_layout(layout, [from_scratch()], command, tag=name, architecture=name)
        for name, command in (
            ("arm64", {"Cmd": ["/never"]}),
            ("amd64", {"Cmd": ["/ours"]}),
        )
    }
    listed = json.loads((layout / "index.json").read_text())["manifests"]
    kind = "application/vnd.oci.image.index.v1+json"
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": listed}
    write_layout_index(layout, json.dumps(index).encode())
    open_registry.push(layout, "several")
    image = imported(f"oci:{open_registry.host}/several", store)
    program = store.manifest(image.digest).program
    assert program is not None
    assert program.command == ("/ours",)

    only = f"oci:{open_registry.host}/several@{digests['arm64']}"
    with pytest.raises(ImageRejected, match="linux/arm64, not linux/amd64"):
        imported(only, store)


def write_layout_index(layout: Path, index: bytes) -> None:
    """Make ``index`` the only entry of the layout."""
    digest = hashlib.sha256(index).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(index)
    descriptor = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": f"sha256:{digest}",
        "size": len(index),
        "annotations": {"org.opencontainers.image.ref.name": "latest"},
    }
    whole = {"schemaVersion": 2, "manifests": [descriptor]}
    (layout / "index.json").write_text(json.dumps(whole))


def test_a_private_repository_wants_the_right_credentials(
    tmp_path: Path, private_registry: Registry, store: ImageStore
) -> None:
    reference = published(private_registry, tmp_path, "secret/tool", from_scratch())
    for access in (OPEN, RegistryAccess(username=USER, password="wrong-horse", insecure=True)):
        with pytest.raises(Unauthenticated) as caught:
            imported(reference, store, access)
        assert "wrong-horse" not in str(caught.value)
        assert "--password-stdin" in caught.value.hint
    right = RegistryAccess(username=USER, password=PASSWORD, insecure=True)
    image = imported(reference, store, right)
    assert list(workdir(store).glob("container-*")) == []  # no credentials remain

    authfile = tmp_path / "auth.json"
    login = ["skopeo", "login", "--authfile", authfile, "--tls-verify=false", "--username", USER]
    subprocess.run(
        [*login, "--password-stdin", private_registry.host],
        input=PASSWORD.encode(),
        check=True,
        timeout=60,
    )
    again = imported(reference, store, RegistryAccess(authfile=authfile, insecure=True))
    assert again.digest == image.digest


def test_credentials_are_on_no_command_line(
    tmp_path: Path, private_registry: Registry, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = published(private_registry, tmp_path, "hushed", Layer().file("hushed"))
    real, seen = shutil.which("skopeo"), tmp_path / "seen"
    watcher = tmp_path / "bin" / "skopeo"
    watcher.parent.mkdir()
    watcher.write_text(
        "#!/bin/sh\n"
        f'{{ echo "$@"; env; stat -c %a "$TMPDIR" "$TMPDIR/auth.json"; }} >>{seen}\nexec {real} "$@"\n'
    )
    watcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{watcher.parent}:{os.environ['PATH']}")
    access = RegistryAccess(username=USER, password=PASSWORD, insecure=True)
    imported(reference, store, access)
    told = seen.read_text()
    assert told.count("--authfile") == 2
    assert told.count("\n700\n600\n") == 2
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    assert PASSWORD not in told
    assert secret not in told


def test_what_a_killed_import_left_is_removed_by_the_next(tmp_path: Path, store: ImageStore) -> None:
    dead, live = workdir(store) / "container-dead", workdir(store) / "container-live"
    for folder in (dead, live):
        folder.mkdir()
        (folder / "auth.json").write_text("{}")
    write_layout(tmp_path / "layout", [Layer().file("x")])
    try:
        with (live / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            imported(f"oci-layout:{tmp_path}/layout", store)
            assert not dead.exists()
            assert live.exists()
    finally:
        shutil.rmtree(live)


def test_the_command_line_imports_and_runs(
    tmp_path: Path, private_registry: Registry, store: ImageStore
) -> None:
    config = {"Entrypoint": ["/busybox"], "Cmd": ["echo", "from the image"]}
    reference = published(private_registry, tmp_path, "cli", from_scratch(), **config)
    workdir(store)
    words = ["--insecure", "--username", USER, "--password-stdin"]
    call = partial(vmjobs, image_dir=store.root, state_dir=tmp_path / "s", hypervisors="uml")
    refused = {"stdin": "not this one\n", "code": Unauthenticated.exit_code}
    wrong = call("image", "import", reference, "tool:1", *words, **refused)
    assert "Traceback" not in wrong.err
    done = call("image", "import", reference, "tool:1", "--json", *words, stdin=f"{PASSWORD}\n")
    told = done.json
    assert (told["name"], told["tag"], told["digest"]) == ("tool", "1", store.resolve("tool:1"))
    assert told["source"].startswith(f"{reference}:latest@sha256:")

    hypervisor = ["--hypervisor", "uml", "--memory", "128", "--disk", "64"]
    ran = call("run", "--strategy", "image", "--image", "tool:1", *hypervisor)
    assert (ran.code, ran.out) == (0, "from the image\n"), ran.err
    direct = ["run", "--strategy", "image", "--image", f"oci-layout:{tmp_path}/layout", *hypervisor]
    ran = call(*direct, "--json")
    assert (ran.code, ran.json["state"]) == (0, "COMPLETED"), ran.err
    assert ran.err == "from the image\n"


@pytest.mark.parametrize(
    ("reference", "kind", "words"),
    [
        ("oci:{host}/no/such/thing", NotFound, "cannot fetch"),
        ("oci:{host}/here:no-such-tag", NotFound, "no-such-tag"),
        ("oci:{host}/here@sha256:" + "0" * 64, NotFound, "sha256:000"),
        ("oci:127.0.0.1:9/here", Unavailable, "refused"),
        ("oci:registry.invalid/here", Unavailable, "registry.invalid"),
        ("oci-layout:{here}:no-such-tag", NotFound, "no-such-tag"),
        ("oci-layout:/no/such/folder", NotFound, "/no/such/folder"),
        ("docker-archive:/no/such/file", NotFound, "/no/such/file"),
    ],
)
def test_what_is_not_there_is_said_to_be_missing(
    tmp_path: Path,
    open_registry: Registry,
    store: ImageStore,
    reference: str,
    kind: type[VMJobsError],
    words: str,
) -> None:
    published(open_registry, tmp_path, "here", Layer().file("x"))
    with pytest.raises(kind) as caught:
        imported(reference.format(host=open_registry.host, here=tmp_path / "layout"), store)
    assert words in str(caught.value)


def test_a_registry_without_https_is_used_only_when_told_to(
    tmp_path: Path, open_registry: Registry, store: ImageStore
) -> None:
    reference = published(open_registry, tmp_path, "plain", Layer().file("x"))
    with pytest.raises(Unavailable) as caught:
        imported(reference, store, RegistryAccess())
    assert "--insecure" in caught.value.hint


def test_a_layer_that_is_damaged_in_the_registry_is_noticed(
    tmp_path: Path, open_registry: Registry, store: ImageStore
) -> None:
    layer = Layer().file("x", os.urandom(100_000))
    reference = published(open_registry, tmp_path, "damaged", layer)
    manifest = json.loads((tmp_path / "layout/index.json").read_text())["manifests"][0]
    text = (tmp_path / "layout/blobs/sha256" / manifest["digest"].partition(":")[2]).read_text()
    blob = open_registry.blob(json.loads(text)["layers"][0]["digest"])
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(DigestMismatch):
        imported(reference, store)
    assert list(workdir(store).glob("container-*")) == []


def test_a_hostile_layer_leaves_nothing_behind(store: ImageStore, made: Made) -> None:
    """One refused layer; tests/unit/test_oci_layers.py has all of them."""
    before = set(store.root.rglob("*"))
    with pytest.raises(ImageRejected):
        made([Layer().symlink("etc", "/etc").file("etc/../../escape", "x")])
    after = {path for path in store.root.rglob("*") if "locks" not in path.parts}
    assert after <= before
    assert list(workdir(store).glob("container-*")) == []
