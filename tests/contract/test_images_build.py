"""Real builds: the same inputs give the same image, in which e2fsck finds no errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from images.build import bootstrap, kernel, process, wheels
from images.build.builder import build
from images.store.image_store import ImageStore
from tests.kit.image_builds import STORE, WORK, fsck, need
from vmjobs.errors import BuildError
from vmjobs.model import MIB


@pytest.mark.soak
def test_two_builds_from_nothing_give_the_same_image(tmp_path: Path) -> None:
    need("mmdebstrap", "dpkg-deb")
    steps: list[str] = []
    digests = []
    for place in ("one", "two"):
        store = ImageStore(tmp_path / place / "store")
        entry = build("generic", store, tmp_path / place / "work", lambda s, _f: steps.append(s))
        digests.append(entry.digest)
        assert fsck(store.prepare(entry.digest).root) == []
    assert digests[0] == digests[1]
    assert steps[-1] == "done"
    manifest = store.manifest(digests[1])
    assert manifest.root.size < 150 * MIB
    assert {"bash", "busybox-static", "e2fsprogs"} <= set(manifest.packages)
    assert store.resolve("generic") == store.resolve("generic:1") == digests[1]


def test_what_was_built_is_not_built_again(tmp_path: Path) -> None:
    store = ImageStore(STORE)
    first = build("generic", store, WORK)
    began = time.monotonic()
    # A directory without packages: any step of a build would have to fetch them.
    assert build("generic", store, tmp_path / "nothing-here") == first
    assert time.monotonic() - began < 15  # a build takes minutes
    assert not (tmp_path / "nothing-here").exists()


def test_nothing_is_fetched_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new store with the same downloads gets the same image; no program downloads."""
    here = build("hep", ImageStore(STORE), WORK)
    programs: list[str] = []

    def count(argv: Sequence[str | Path], **options: Any) -> bytes:
        programs.append(str(argv[0]))
        return process.run(argv, **options)

    for module in (bootstrap, wheels, kernel):
        monkeypatch.setattr(module, "run", count)
    assert build("hep", ImageStore(tmp_path / "store"), WORK).digest == here.digest
    assert programs == ["dpkg-deb"]


def test_packages_that_do_not_exist_are_named(tmp_path: Path) -> None:
    need("mmdebstrap")
    file = tmp_path / "bad.toml"
    # This suite has few packages: their list is soon read.
    head = 'name = "bad"\nversion = "1"\nsuite = "bookworm-updates"\nepoch = 0\n'
    file.write_text(f'{head}packages = ["no-such-package"]\n')
    with pytest.raises(BuildError, match="no-such-package failed"):
        build(str(file), ImageStore(tmp_path / "store"), tmp_path / "work")
    assert not list((tmp_path / "work").rglob("*.tar"))


def test_the_initial_ram_disk_has_what_the_root_disk_takes() -> None:
    store = ImageStore(STORE)
    image = store.prepare(build("generic", store, WORK).digest)
    assert image.initrd is not None
    data = image.initrd.read_bytes()
    for name in (b"modules/virtio_pci.ko\0", b"modules/virtio_blk.ko\0", b"modules/virtio_net.ko\0"):
        assert name in data
    assert data.startswith(b"070701")
    assert len(data) < 4 * MIB
