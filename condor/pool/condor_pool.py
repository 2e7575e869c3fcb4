"""An HTCondor pool that cluster VMs join.

A VM's machine ad is untrusted: root in the VM can write anything into it. The collector ensures that it
is about no other VM (condor/config/site-clusters.conf).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from condor import names
from condor.daemon_client import Ad, CallError, call
from condor.node.chirp import literal
from condor.pool.offline_ads import offline_ad, stable_attributes
from condor.pool.tokens import user_name_of
from condor.submit.description import Submission
from condor.submit.schedd import Schedd
from vmjobs.cluster.pool import IdleJobs, PoolVm, ProbeState, WorkerVmProfile
from vmjobs.config import PoolSetting
from vmjobs.errors import Unavailable
from vmjobs.model import JobAction

log = logging.getLogger(__name__)

#: The collector drops an offline ad that is not renewed after this many seconds.
OFFER_SECONDS: Final = 900
#: A probe job that has not run after this many seconds leaves the queue, and has failed.
PROBE_SECONDS: Final = 300
#: How far back the history is read for one, in seconds: a schedd checks its queue every minute.
_HISTORY_SECONDS: Final = 2 * PROBE_SECONDS

#: How many seconds the clocks of the service's hosts and the pool's may differ.
_MAX_CLOCK_SKEW_SECONDS: Final = 60

_MACHINE_AD: Final = (
    names.MEMBER,
    names.INCARNATION,
    names.MACHINE,
    names.ADMITTED,
    names.DYNAMIC_SLOTS,
    names.JOB_STARTS,
    names.SYSTEM,
)
#: Ads of cluster VMs: each has one partitionable slot.
_CLUSTER_VM_SLOT: Final = f"{names.MEMBER} =!= undefined && PartitionableSlot =?= true"
#: Values of HTCondor's ``JobStatus``.
_REMOVED, _COMPLETED, _HELD = 3, 4, 5
_MAX_INTEGER: Final = 2**31 - 1
_VM_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,62}")
_VM_KEY: Final = re.compile(r"[0-9a-f]{32}\.[0-9]{1,10}")
_PROBE_AD: Final = (
    names.CLUSTER_ID,
    names.PROC_ID,
    names.PROBE,
    names.JOB_STATUS,
    names.EXIT_CODE,
)
#: No limit on the number of ads.
_NO_LIMIT: Final = -1


class CondorPool:
    """Implements :class:`repository.clusters.pools.Pool`.

    name: its name in the settings. setting: its addresses. token_seconds: lifetime of its VMs' tokens.
    timeout: seconds for each exchange with a daemon.

    Uses the identity of this process's user, as for submitting jobs. Withdrawing needs ADVERTISE_STARTD
    (condor/config/site-clusters.conf).
    """

    def __init__(
        self,
        name: str,
        setting: PoolSetting,
        *,
        token_seconds: int = 600,
        timeout: float = 30.0,
    ) -> None:
        self._name = name
        self._collector = setting.collector
        self._schedd_name = setting.schedd
        self._schedd = Schedd(setting.schedd, setting.collector, timeout)
        # Every user can mark a job as a probe, but none can submit one as another user.
        self._ours = f"{names.OWNER} =?= {literal(setting.user, limit=0)}"
        self._timeout = timeout
        self._token_seconds = token_seconds

    def vms(self) -> list[PoolVm]:
        with self._translated():
            answer = call(
                "startds",
                self._timeout,
                pool=self._collector,
                constraint=_CLUSTER_VM_SLOT,
                projection=list(_MACHINE_AD),
            )
        return [vm_from_ad(ad) for ad in answer["ads"] if is_vm_ad(ad)]

    def probes(self, vms: Sequence[PoolVm]) -> dict[tuple[str, int], ProbeState]:
        asked = {vm_key(each): each for each in vms}
        if not asked:
            return {}
        constraint = f"{self._ours} && {names.PROBE} =!= undefined"
        with self._translated():
            found = probe_states(self._schedd.query(constraint, _PROBE_AD))
            if not asked.keys() <= found.keys():
                until = f"EnteredCurrentStatus < {int(time.time()) - _HISTORY_SECONDS}"
                ended = self._schedd.history(constraint, _PROBE_AD, _NO_LIMIT, until)
                found = {**probe_states(ended), **found}
            if new := [each for target, each in asked.items() if target not in found]:
                self._schedd.submit(probe_jobs(new))
        return {
            (each.id, each.incarnation): found.get(target, ProbeState.WAITING)
            for target, each in asked.items()
        }

    def withdraw(self, vms: Sequence[PoolVm]) -> None:
        """A pool without condor/config/site-revocation.conf lets the tokens expire."""
        if not vms:
            return
        # Root in a VM can advertise another VM's id, but not another VM's name.
        named = f'strcat({names.MEMBER}, "/", {names.MACHINE})'
        constraint = membership_expression(named, [f"{each.name}/{vm_key(each)}" for each in vms])
        users = [user_name_of(each) for each in vms]
        until = self._token_seconds + _MAX_CLOCK_SKEW_SECONDS
        with self._translated():
            # The tokens first: otherwise a running VM could advertise itself again with its token.
            call("revoke", self._timeout, pool=self._collector, users=users, seconds=until)
            call("withdraw", self._timeout, pool=self._collector, constraint=constraint)
            probing = membership_expression(names.PROBE, [vm_key(each) for each in vms])
            probes = self._schedd.query(f"{self._ours} && {probing}", _PROBE_AD)
            if ids := [f"{ad[names.CLUSTER_ID]}.{ad[names.PROC_ID]}" for ad in probes]:
                self._schedd.act(JobAction.CANCEL, ids, "the VM that this job was to test is gone")

    def idle(self, kinds: Sequence[WorkerVmProfile]) -> dict[str, IdleJobs]:
        """Of all schedds that the collector knows."""
        asked = [{"cluster": k.cluster, "learn": k.learn, "ad": offline_ad(k)} for k in kinds]
        with self._translated():
            answer = call(
                "idle", self._timeout, pool=self._collector, schedd=self._schedd_name, kinds=asked
            )
        for problem in answer["problems"]:
            log.warning("pool %s: idle jobs are not counted at %s", self._name, problem)
        return {
            kind.cluster: IdleJobs(
                **answer["waiting"][kind.cluster],
                known=stable_attributes(answer["known"].get(kind.learn, {})),
            )
            for kind in kinds
        }

    def offer(self, kinds: Sequence[WorkerVmProfile]) -> None:
        ads = []
        for kind in kinds:
            ad = {**offline_ad(kind), "ClassAdLifetime": str(OFFER_SECONDS)}
            made_of = hashlib.sha256(json.dumps(ad, sort_keys=True).encode()).hexdigest()
            ads.append({**ad, names.OFFER: literal(made_of)})
        with self._translated():
            call("offer", self._timeout, pool=self._collector, ads=ads, renew=OFFER_SECONDS // 3)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            said = str(error) if error.named else f"collector {self._collector}: {error}"
            raise Unavailable("pool", f"pool {self._name}: {said}", hint=_HINT) from error
        except Unavailable as error:
            raise Unavailable("pool", f"pool {self._name}: {error.message}", hint=error.hint) from error


_HINT: Final = "condor_ping -type collector -table READ ADVERTISE_STARTD shows what it permits"


def is_vm_ad(ad: Ad) -> bool:
    vm, target = ad.get(names.MEMBER), ad.get(names.MACHINE)
    incarnation = _number(ad, names.INCARNATION)
    return (
        isinstance(vm, str)
        and isinstance(target, str)
        and bool(_VM_NAME.fullmatch(vm) and _VM_KEY.fullmatch(target))
        and 0 < incarnation < _MAX_INTEGER
        and target.endswith(f".{incarnation}")
    )


def vm_from_ad(ad: Ad) -> PoolVm:
    """A VM as its ad describes it, without the probe among its jobs."""
    starts = _number(ad, names.JOB_STARTS)
    system, target = ad.get(names.SYSTEM, ""), ad.get(names.MACHINE, "")
    return PoolVm(
        name=ad[names.MEMBER],
        incarnation=ad[names.INCARNATION],
        id=target.partition(".")[0],
        busy=_number(ad, names.DYNAMIC_SLOTS) > 0,
        jobs=max(0, starts - 1) if ad.get(names.ADMITTED) is True else 0,
        system="".join(c for c in system[:64] if c.isprintable()) if isinstance(system, str) else "",
    )


def _number(ad: Ad, name: str) -> int:
    """An integer of the ad, limited to what a database column stores; 0 if it has none."""
    value = ad.get(name)
    return max(0, min(value, _MAX_INTEGER)) if type(value) is int else 0


def vm_key(known: PoolVm) -> str:
    """The VM's ``VMJobsMachine``."""
    return f"{known.id}.{known.incarnation}"


def membership_expression(expression: str, values: Sequence[str]) -> str:
    """A ClassAd expression: whether a string is one of these, which have no commas or spaces.

    It has one list of any length: HTCondor 25.14 fails to evaluate some hundreds of comparisons in a
    row, and then matches no ad.
    """
    return f"(stringListMember({expression}, {literal(','.join(values), limit=0)}) =?= true)"


def probe_jobs(vms: Sequence[PoolVm]) -> Submission:
    """One probe job for each VM; it runs only a program that is in the VM already."""
    description: Mapping[str, str] = {
        "universe": "vanilla",
        "executable": names.PROBE_PROGRAM,
        "transfer_executable": "false",
        "should_transfer_files": "YES",
        "when_to_transfer_output": "ON_EXIT",
        "transfer_output_files": '""',
        "initialdir": "/tmp",  # noqa: S108  nothing is written there
        "requirements": f"TARGET.{names.MACHINE} =?= MY.{names.PROBE}",
        "request_cpus": "1",
        "request_memory": "16",
        "request_disk": "1024",  # KiB
        "notification": "never",
        "batch_name": "probes",
        # The service stops waiting for a probe no later than this.
        "periodic_remove": f"JobStatus == 5 || time() - QDate > {PROBE_SECONDS}",
        # The service needs the result soon; other checks detect a VM that dies during its probe.
        "job_lease_duration": "60",
        f"+{names.PROBE}": '"$(vmjobs_vm)"',
    }
    items = [{"vmjobs_vm": vm_key(each)} for each in vms]
    return Submission(dict(description), items)


def probe_states(ads: Iterable[Ad]) -> dict[str, ProbeState]:
    """The states of probe jobs, by ``VMJobsMachine``; of several for one VM the first counts."""
    found: dict[str, ProbeState] = {}
    for ad in ads:
        found.setdefault(str(ad.get(names.PROBE, "")), probe_state(ad))
    return found


def probe_state(ad: Ad) -> ProbeState:
    """The state of a probe job from its ad, in the queue or in the history."""
    status = ad.get(names.JOB_STATUS)
    if status == _COMPLETED:
        return ProbeState.RAN if ad.get(names.EXIT_CODE) == 0 else ProbeState.FAILED
    if status in {_REMOVED, _HELD}:
        return ProbeState.FAILED
    return ProbeState.WAITING
