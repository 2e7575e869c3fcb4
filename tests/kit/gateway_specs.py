"""A gateway's declaration, which tests vary."""

from __future__ import annotations

from typing import Any


def gateway_spec(**changes: Any) -> dict[str, Any]:
    ce = {"role": "computing-element", "image": "gateway-ce", "address": "10.77.0.10", "memory": 512}
    wn: dict[str, Any] = {"role": "worker", "recipe": "mine.toml", "address": "10.77.0.20"}
    wn["limits"] = {"cpu_percent": 50}
    return {
        "gateway": "tier3",
        "domain": "tier3.example",
        "network": "10.77.0.0/24",
        "machines": {"ce": ce, "wn": wn},
        **changes,
    }
