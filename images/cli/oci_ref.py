"""Imports container images given as a job's image, and pushes them if needed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from images.oci.reference import is_reference
from images.store.image_store import ImageStore
from vmjobs import __version__
from vmjobs.cli.common import config, repository
from vmjobs.cli.progress import step_bars
from vmjobs.wire import ImageDetail, Origin

if TYPE_CHECKING:
    from images.oci.fetch import RegistryAccess
    from images.oci.importer import ImportedImage


def resolve_image(ref: str, *, push: bool = False) -> str:
    """Return ``ref``, or the digest of the image made from the container that it names.

    push: also push the image to the repository. Credentials are those of skopeo or docker.

    Raises:
        The errors of :func:`images.oci.import_reference` and of the service.
    """
    if not is_reference(ref):
        return ref
    from images.oci.fetch import RegistryAccess  # noqa: PLC0415 - slow import, containers only

    found = import_container(ref, RegistryAccess())
    if push:
        push_container(found)
    return found.digest


def import_container(ref: str, access: RegistryAccess, name: str = "", tag: str = "") -> ImportedImage:
    """Import a container image into the local store, with a progress bar."""
    from images.oci.importer import import_reference  # noqa: PLC0415

    settings = config()
    work = settings.images.parent / "work"
    with step_bars(transient=True) as bars:
        task = bars.add_task(ref, total=1.0)

        def tell(step: str, fraction: float) -> None:
            bars.update(task, description=f"{ref}: {step}", completed=fraction)

        return import_reference(
            ref, ImageStore(settings.images), work, tell, access=access, name=name, tag=tag
        )


def push_container(found: ImportedImage, namespace: str = "") -> ImageDetail:
    """Push an imported image to the repository under its local name."""
    # Slow imports that only this function needs.
    from images.cli.common import QualifiedName  # noqa: PLC0415
    from images.cli.upload import PublishOptions, from_store, send_and_publish  # noqa: PLC0415

    origin = Origin(source=found.source[:1024], format="oci", builder=f"vmjobs {__version__}")
    pending = replace(
        from_store(ImageStore(config().images), found.digest), name=found.name, origin=origin
    )
    wanted = QualifiedName(namespace, found.name, found.tag)
    with repository() as images:
        return send_and_publish(images, pending, wanted, PublishOptions())[0]
