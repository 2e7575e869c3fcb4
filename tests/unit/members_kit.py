"""Orders and records of members, for tests."""

from __future__ import annotations

from vmjobs.agent.members.record import Record
from vmjobs.cluster.member import Goal
from vmjobs.cluster.wire import MemberOrder, PoolAddress

NOW = 1_800_000_000.0
POOL = PoolAddress(name="site", collector="pool.site.grid", trust_domain="site.grid")


def member_order(number: int = 0, **fields: object) -> MemberOrder:
    """An order for a machine that is to run."""
    values: dict[str, object] = {
        "id": f"{number:032x}",
        "cluster": "debian",
        "name": f"debian-{number}",
        "goal": Goal.RUN,
        "image": "sha256:" + "0" * 64,
        "cpus": 1,
        "memory": 128,
        "disk": 64,
        "pool": POOL,
        "boot_seconds": 60,
        "drain_seconds": 1000,
    }
    return MemberOrder.model_validate({**values, **fields})


def member_record(order: MemberOrder | None = None, **fields: object) -> Record:
    """A record of a member, as of ``NOW``."""
    return Record.model_validate({"order": order or member_order(), "since": NOW - 100, **fields})
