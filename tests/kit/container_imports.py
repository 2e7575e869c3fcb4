"""Containers as VM images: a store, working directories, and programs that need little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.oci.fetch import RegistryAccess
from images.oci.importer import ImportedImage, import_reference
from images.store.image_store import ImageStore
from tests.kit.container_images import Layer, write_layout
from tests.kit.image_builds import WORK, Bench, Guest, need
from vmjobs.model import NetworkMode

Made = Callable[..., ImportedImage]
OPEN = RegistryAccess(insecure=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("skopeo", "docker-registry", "mmdebstrap", "busybox")
    return tmp_path_factory.mktemp("containers")


@pytest.fixture(scope="module")
def store(place: Path) -> ImageStore:
    return ImageStore(place / "store")


@pytest.fixture
def made(tmp_path: Path, store: ImageStore) -> Callable[..., ImportedImage]:
    """Function that imports a container of given layers and configuration."""

    def make(layers: list[Layer], config: dict[str, Any] | None = None) -> ImportedImage:
        write_layout(tmp_path / "layout", layers, config)
        return imported(f"oci-layout:{tmp_path}/layout", store, name="container")

    return make


def busybox() -> bytes:
    return Path("/bin/busybox").read_bytes()


def from_scratch() -> Layer:
    """A program and nothing else: no shell under its usual name, no users, no directories."""
    return Layer().file("busybox", busybox(), 0o755)


def run(vms: Bench, image: ImportedImage, **fields: Any) -> Guest:
    """Run the container in a VM, to its end."""
    values = {"network": NetworkMode.NONE, "strategy": "image", **fields}
    return vms.start(image.digest, values.pop("script", ""), **values).end()


def imported(
    reference: str, store: ImageStore, access: RegistryAccess = OPEN, **options: Any
) -> ImportedImage:
    return import_reference(reference, store, workdir(store), access=access, **options)


def workdir(store: ImageStore) -> Path:
    """The default working directory, beside the store; kernel and tools are shared."""
    folder = store.root.parent / "work"
    if not folder.exists():
        folder.mkdir()
        for shared in ("containers", "packages"):
            (WORK / shared).mkdir(parents=True, exist_ok=True)
            (folder / shared).symlink_to(WORK / shared)
    return folder
