"""The actions for clusters in each situation: the table of ``vmjobs.cluster.plan``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.kit.cluster_plans import (
    BACK,
    NOW,
    ONE,
    TWO,
    at,
    cluster,
    created,
    drained,
    failing,
    node,
    runs,
    up,
    vm,
)
from vmjobs.cluster.actions import (
    Action,
    AllowJobs,
    AssignNode,
    CompleteRollout,
    CreateVm,
    DeleteCluster,
    DeleteVm,
    PauseRollout,
    RemoveAd,
    ReplaceVm,
    RollBack,
    SetGoal,
    SetPending,
)
from vmjobs.cluster.placement import NodeSnapshot, Placement
from vmjobs.cluster.plan import AD_LIFETIME, NODE_GIVEN_UP_AFTER, plan
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.snapshot import ClusterSnapshot, ClusterVmSnapshot
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase


def waits(number: int, **more: Any) -> ClusterVmSnapshot:
    return vm(number, "n1", phase=Phase.WAITING, **more)


def boots(number: int, **more: Any) -> ClusterVmSnapshot:
    return vm(number, "n1", phase=Phase.BOOTING, **more)


def joined(number: int, probe: ProbeState, **more: Any) -> ClusterVmSnapshot:
    return runs(number, advertised=1, probe=probe, **more)


def condemned(code: ClusterVmCode, why: str) -> ReplaceVm:
    return ReplaceVm("vc-0", 1, code, why)


def gone(number: int) -> DeleteVm:
    return DeleteVm(f"vc-{number}")


LOST = [node("n1", silent=400), node("n2")]
DRAIN: dict[str, Any] = {"goal": Goal.DRAIN}

#: The cluster, the expected actions, and the nodes, if not one with room.
TABLE: dict[str, tuple[ClusterSnapshot, list[Action], *tuple[Sequence[NodeSnapshot], ...]]] = {
    "all is well": (cluster(up(0), up(1), target=2), []),
    # -- size
    "the first machines are spread": (cluster(target=2), [created(0, "n1"), created(1, "n2")], TWO),
    "then where most memory is left": (
        cluster(target=1),
        [created(0, "n2")],
        [node("n1", 3), node("n2", 4)],
    ),
    "the lowest number is used again": (cluster(up(1), target=2), [created(0, "n1")]),
    "a name is free once its machine has gone": (cluster(up(0, **DRAIN), target=1), [created(1, "n1")]),
    "one that came late gets a node": (cluster(vm(0), target=1), [AssignNode("vc-0", "n1")]),
    "smaller: the highest number goes": (cluster(up(0), up(1), target=1), [drained(1)]),
    "smaller: rather one that is not busy": (cluster(up(0), up(1, busy=True), target=1), [drained(0)]),
    "smaller: rather one that is not up": (cluster(runs(0), up(1), target=1), [drained(0)]),
    "smaller: rather one that waits for its next try": (
        cluster(failing(0), runs(1), up(2), target=2),
        [drained(0)],
    ),
    "smaller: before all one that has no node": (cluster(vm(0), failing(1), target=1), [gone(0)]),
    # -- room
    "what is ending still has its room": (
        cluster(up(0, **DRAIN), up(1, goal=Goal.STOP, phase=Phase.STOPPING), vm(2), target=1),
        [
            SetPending(
                "vc-2",
                ClusterVmCode.NO_ROOM,
                "no node has room: n1 lacks 1 processors and 1024 MiB of memory and 1000 MiB of disk; "
                "settings cluster_cpus, cluster_memory and cluster_disk of a node say what it offers",
            )
        ],
        [node("n1", 2)],
    ),
    "the same reason is told once": (
        cluster(
            vm(0, code=ClusterVmCode.NO_NODE, why="no node has registered with the service"),
            target=1,
        ),
        [],
        [],
    ),
    # -- in the pool
    "a probe job ran": (cluster(joined(0, ProbeState.RAN), target=1), [AllowJobs("vc-0", 1)]),
    "a probe job waits": (cluster(joined(0, ProbeState.WAITING), target=1), []),
    "a probe job failed": (
        cluster(joined(0, ProbeState.FAILED), target=1),
        [
            condemned(
                ClusterVmCode.PROBE_FAILED,
                "its probe job failed: the VM is in the pool but runs no jobs",
            )
        ],
    ),
    "it did not join in time": (
        cluster(runs(0, waiting=at(101)), target=1),
        [condemned(ClusterVmCode.JOIN_TIMED_OUT, "the VM did not join the pool within 100 s")],
    ),
    "its probe did not run in time": (
        cluster(joined(0, ProbeState.WAITING, waiting=at(101)), target=1),
        [condemned(ClusterVmCode.JOIN_TIMED_OUT, "its probe job did not run within 100 s")],
    ),
    "a machine is condemned once": (cluster(runs(0, waiting=at(101), condemned=1), target=1), []),
    "a pool that does not answer condemns nobody": (cluster(runs(0, waiting=None), target=1), []),
    "the ad of another machine is not its ad": (
        cluster(runs(0, incarnation=2, withdrawn=1, advertised=3, probe=ProbeState.RAN), target=1),
        [],
    ),
    "an ad that vanished has time to come back": (
        cluster(up(0, advertised=0, waiting=at(101)), target=1),
        [],
    ),
    "it does not come back": (
        cluster(up(0, advertised=0, waiting=NOW - AD_LIFETIME - timedelta(seconds=1)), target=1),
        [condemned(ClusterVmCode.JOIN_TIMED_OUT, "the VM has been missing from the pool for 900 s")],
    ),
    "a machine that ended is withdrawn": (
        cluster(waits(0, incarnation=1, advertised=1), target=1),
        [RemoveAd("vc-0")],
    ),
    "so is one that nobody has seen in the pool: it may have a token": (
        cluster(waits(0, incarnation=2, withdrawn=1), target=1),
        [RemoveAd("vc-0")],
    ),
    "a pool that was told is told once": (cluster(waits(0, incarnation=2, withdrawn=2), target=1), []),
    "and again if it is there after all": (
        cluster(boots(0, incarnation=2, withdrawn=1, advertised=1), target=1),
        [RemoveAd("vc-0")],
    ),
    "one may join before its agent says that it runs": (
        cluster(boots(0, incarnation=2, advertised=2, withdrawn=1), target=1),
        [],
    ),
    # -- lost nodes
    "another machine takes the place of a lost one": (
        cluster(up(0), target=1),
        [created(1, "n2")],
        LOST,
    ),
    "if there is room": (cluster(up(0), target=1), [], [node("n1", silent=400), node("n2", 0)]),
    "one lost and one missing: who is missing is shown": (
        cluster(up(0), target=2),
        [
            CreateVm(
                "vc",
                "vc-1",
                Placement(
                    code=ClusterVmCode.NO_NODE,
                    why="no node can run it: n1 has sent no recent heartbeat",
                ),
            )
        ],
        [node("n1", silent=400)],
    ),
    "a lost one is not surplus": (cluster(up(0), up(1, "n2"), target=1), [], LOST),
    "a node that does not come back is given up": (
        cluster(up(0), up(1, "n2"), target=1),
        [drained(0)],
        [node("n1", silent=NODE_GIVEN_UP_AFTER.total_seconds()), node("n2")],
    ),
    "so is one that nobody knows": (cluster(up(0, "n9"), up(1), target=1), [drained(0)]),
    "a lost one that was to stop is forgotten": (cluster(up(0, goal=Goal.STOP)), [gone(0)], LOST),
    "a lost one that drains has its time": (cluster(up(0, **DRAIN)), [], LOST),
    "and then is forgotten": (cluster(up(0, **DRAIN), spec={"drain_seconds": 399}), [gone(0)], LOST),
    # -- drained and deleted
    "one that is gone is forgotten and replaced": (
        cluster(vm(0, "n1", phase=Phase.GONE), target=1),
        [gone(0), created(1, "n1")],
    ),
    "a draining cluster": (
        cluster(up(0), vm(1), up(2, **DRAIN), target=3, draining=True),
        [drained(0), gone(1)],
    ),
    "a cluster that is deleted now": (
        cluster(up(0), up(1, **DRAIN), target=3, deleting=Goal.STOP),
        [SetGoal("vc-0", Goal.STOP), SetGoal("vc-1", Goal.STOP)],
    ),
    "a cluster goes with its last member": (
        cluster(target=3, deleting=Goal.DRAIN),
        [DeleteCluster("vc")],
    ),
    # -- a new declaration
    "the first one of an old generation": (cluster(up(0), up(1), target=2, generation=2), [drained(1)]),
    "its successor is made at once": (
        cluster(up(0), up(1, **DRAIN), target=2, generation=2),
        [created(2, "n1")],
    ),
    "the next one waits until that is up": (
        cluster(up(0), runs(2, generation=2), target=2, generation=2),
        [],
    ),
    "and until the one before has gone": (
        cluster(up(0), up(2, generation=2), up(1, **DRAIN), target=2, generation=2),
        [],
    ),
    "then it follows": (cluster(up(0), up(2, generation=2), target=2, generation=2), [drained(0)]),
    "not while another one is down that was up": (
        cluster(up(0), up(1, phase=Phase.WAITING, failures=1), target=2, generation=2),
        [RemoveAd("vc-1")],
    ),
    "not while another one is lost": (cluster(up(0), up(1, "n2"), target=1, generation=2), [], LOST),
    "those that never were up hold up nothing, and go first": (
        cluster(up(0), failing(1), failing(2), target=3, generation=2),
        [drained(2)],
    ),
    "those without a node are simply made anew": (
        cluster(up(0), vm(1), target=2, generation=2),
        [gone(1), created(2, "n1")],
    ),
    "a failing successor ends it": (
        cluster(up(0), failing(2, generation=2, why="no kernel"), target=2, generation=2),
        [
            PauseRollout(
                "vc",
                "the rollout is paused: vc-2 of generation 2 failed 3 times "
                "(BOOT_FAILED: no kernel); 1 of earlier generations stay. Correct the declaration, or "
                "apply the earlier one again",
            )
        ],
    ),
    "which is told once": (
        cluster(up(0), failing(2, generation=2), target=2, generation=2, stalled=2),
        [],
    ),
    # -- rollback
    "all is up: remembered": (cluster(up(0), target=1, good=0), [CompleteRollout("vc")]),
    "of each generation": (
        cluster(up(0, generation=2), target=1, generation=2, good=1),
        [CompleteRollout("vc")],
    ),
    "not all of it": (
        cluster(up(0), up(1, **DRAIN), up(2, generation=2), target=2, generation=2, good=1),
        [],
    ),
    "not while one is lost": (
        cluster(up(0), up(1, "n2"), target=1, good=0),
        [],
        [node("n1"), node("n2", silent=400)],
    ),
    "nothing is up where nothing is wanted": (cluster(good=0), []),
    "a failing successor takes it back": (
        cluster(
            up(0),
            up(1, generation=2),
            failing(2, generation=2, why="no kernel"),
            runs(3, generation=2),
            target=4,
            generation=2,
            good=1,
        ),
        [RollBack("vc", BACK), drained(2), drained(3)],
    ),
    "then those of the failed one that are up follow, one at a time": (
        cluster(up(0), up(1, generation=2), up(2, generation=2), target=3, generation=1, good=1),
        [drained(2)],
    ),
    "the only machine fails": (
        cluster(failing(2, generation=2, why="no kernel"), target=1, generation=2, good=1),
        [RollBack("vc", BACK), drained(2)],
    ),
    "the last one fails, and others came up": (
        cluster(up(0, generation=2), failing(1, generation=2), target=2, generation=2, good=1),
        [],
    ),
    "what is good itself is not taken back": (
        cluster(up(0, generation=2), failing(1), target=2, generation=1, good=1, stalled=1),
        [],
    ),
}


@pytest.mark.parametrize("case", TABLE, ids=list(TABLE))
def test_the_table(case: str) -> None:
    there, expected, *places = TABLE[case]
    (nodes,) = places or [ONE]
    assert plan([there], {n.name: n for n in nodes}, NOW) == expected
