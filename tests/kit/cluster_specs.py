"""The declaration of a small cluster: as the API receives it, and parsed."""

from __future__ import annotations

from typing import Any

from vmjobs.cluster.spec import ClusterSpec


def body(**more: Any) -> dict[str, Any]:
    return {"name": "vc", "image": "tiny", "size": 1, "memory": 256, "disk": 100, **more}


def spec(**more: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(body(**more))
