"""Checkpoints of jobs, as an agent reports them."""

from __future__ import annotations

from images.content import ContentLayout
from tests.kit.noise import noise
from tests.kit.repository_images import MIB
from vmjobs.model import Checkpoint, HypervisorKind, SavedFile

MEMORY = noise(3 * MIB, seed=7)


def saved(attempt: str, layout: ContentLayout, **changes: object) -> Checkpoint:
    values: dict[str, object] = {
        "machine": f"vmjobs-0123abcd-{attempt}",
        "hypervisor": HypervisorKind.QEMU,
        "platform": "qemu 7.2.22, q35, tcg",
        "sentinel": "5" * 32,
        "guest": "6" * 64,
        "ran": 12.5,
        "files": (
            SavedFile(name="machine.memory", size=layout.size, digest=layout.digest),
            SavedFile(name="stream-out", size=0),
        ),
        **changes,
    }
    return Checkpoint.model_validate(values)
