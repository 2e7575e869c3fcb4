"""Watches of VMs that have a console only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from vmjobs.agent.vm import vm_watch
from vmjobs.agent.vm.console import ConsoleReader
from vmjobs.agent.vm.events import EventQueue
from vmjobs.hypervisor.base import Hypervisor


def watch_of(folder: Path, driver: object, **fields: Any) -> vm_watch.VmWatch:
    """A watch for a VM with its console in ``folder``."""
    reader = ConsoleReader(folder / "console", "sentinel")
    plain = {"event_queue": EventQueue(), "max_console": 1000, "silence": 60, "heard": lambda: 0.0}
    told = {"reader": reader, "on_console": lambda: None, **plain, **fields}
    return vm_watch.VmWatch(driver=cast(Hypervisor, driver), vm_name="it", **told)
