"""A gateway's metrics for Prometheus. They name its VMs, and none of its people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from vmjobs import __version__
from vmjobs.gateway.assignments import GatewayAssignments, GatewayVmState
from vmjobs.gateway.directory import GatewayDirectory


@dataclass(frozen=True, eq=False)
class GatewayMetrics(Collector):
    """Reads the present states of a gateway's VMs at each scrape."""

    place: GatewayDirectory
    assignments: GatewayAssignments

    def registry(self) -> CollectorRegistry:
        made = CollectorRegistry()
        made.register(self)
        return made

    def collect(self) -> Iterable[Metric]:
        name = self.assignments.installed.gateway.name
        told = {"gateway": name, "version": __version__}
        yield InfoMetricFamily("vmjobs_gateway", "The gateway's name and release.", told)
        states = GaugeMetricFamily(
            "vmjobs_gateway_vm_state", "1 for the state of a VM.", labels=["vm", "state"]
        )
        boots = CounterMetricFamily("vmjobs_gateway_vm_boots", "Boots of a VM.", labels=["vm"])
        used = GaugeMetricFamily(
            "vmjobs_gateway_vm_disk_bytes", "Bytes of the host that a VM's disks use.", labels=["vm"]
        )
        full = GaugeMetricFamily(
            "vmjobs_gateway_vm_data_full_ratio", "How full a VM's data disk is.", labels=["vm"]
        )
        records = self.place.records()
        for vm, shown in self.assignments.show(seen=-1, wait=0.0)["machines"].items():
            for state in GatewayVmState:
                states.add_metric([vm, state], state is shown["state"])
            boots.add_metric([vm], records[vm].incarnation if vm in records else 0)
            used.add_metric([vm], self.place.used_bytes(vm))
            if shown.get("full") is not None:
                full.add_metric([vm], shown["full"] / 100)
        yield from (states, boots, used, full)
