"""Operations on clusters for operators: declare, show, scale, drain, delete."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from repository.clusters import autoscaling
from repository.clusters.assignments import bump_revision
from repository.clusters.backoff import backoff_views, clear
from repository.clusters.core import ClusterCore, console_of, find_cluster
from repository.clusters.generations import (
    GenerationStatus,
    failed_view,
    generations,
    is_same_spec,
    last_declared,
    new_generation,
    resize,
)
from repository.clusters.history import MAX_EVENTS, HistoryEntry, record
from repository.clusters.snapshots import cluster_view, load_snapshot, nodes_now, vm_view
from repository.clusters.tables import (
    BackoffRow,
    ClusterEventRow,
    ClusterRow,
    ClusterVmRow,
    GenerationRow,
)
from repository.db.paging import PageRequest, all_pages
from repository.images import Viewer
from repository.jobs.streams import StreamReader
from repository.jobs.validation import unknown_image
from vmjobs.cluster.plan import free_capacity, placement_request
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import ApplyOutcome, ApplyResult, Assessment, Cluster, ClusterEvent
from vmjobs.errors import Conflict, Fault, InvalidRequest, InvalidSpec, NotFound, Unavailable
from vmjobs.model import HypervisorKind, StreamName, check_cpus, check_image_cpus
from vmjobs.model import now as utc_now


class ClusterSpecs(ClusterCore):
    """The operators' part. Names are of clusters; all but apply, list, assess raise NotFound."""

    # -- queries

    def list(self) -> builtins.list[Cluster]:
        """All clusters, by name; without their VMs."""
        return all_pages(self.page)

    def page(self, page: PageRequest) -> tuple[builtins.list[Cluster], str]:
        """Return one page of :meth:`list`, and the cursor of the next page."""
        query = select(ClusterRow).order_by(ClusterRow.name).where(ClusterRow.name > page.cursor)
        ups = select(ClusterVmRow.cluster, func.count()).where(
            ClusterVmRow.state == ClusterVmState.UP.value
        )
        with self.database.read() as session:
            up = {row[0]: row[1] for row in session.execute(ups.group_by(ClusterVmRow.cluster))}
            rows, cursor = page.cut(session.scalars(query.limit(page.rows)).all(), lambda row: row.name)
            kept = generations(session)
            failed = {name: failed_view(kept.get((name, GenerationStatus.FAILED))) for name, _ in kept}
            views = (
                cluster_view(row, up.get(row.name, 0), failed=failed.get(row.name)) for row in rows
            )
            return builtins.list(views), cursor

    def get(self, name: str) -> Cluster:
        """One cluster with its VMs."""
        with self.database.read() as session:
            return self._view(session, find_cluster(session, name))

    def _view(self, session: Session, row: ClusterRow) -> Cluster:
        present = utc_now()
        nodes = nodes_now(session, self.lease, present)
        alive = {name for name, node in nodes.items() if node.alive}
        rows = session.scalars(select(ClusterVmRow).where(ClusterVmRow.cluster == row.name))
        members = [vm_view(member, member.node in alive) for member in rows]
        members.sort(key=lambda member: int(member.name.rpartition("-")[2]))
        failed = generations(session, row.name).get((row.name, GenerationStatus.FAILED))
        images = {row.image, *(m.image for m in members), *([failed.image] if failed else [])}
        known = session.scalars(select(BackoffRow).where(BackoffRow.image.in_(sorted(images))))
        guards = backoff_views(known, images, present)
        up = sum(m.state is ClusterVmState.UP for m in members)
        return cluster_view(row, up, members, guards, failed_view(failed))

    def events(self, name: str, after: int = 0) -> builtins.list[ClusterEvent]:
        """The last lines of the cluster's history, past event number ``after``, oldest first."""
        with self.database.read() as session:
            after = max(after, find_cluster(session, name).events_count - MAX_EVENTS)
            query = select(ClusterEventRow).where(
                ClusterEventRow.cluster == name, ClusterEventRow.seq > after
            )
            return [
                ClusterEvent.model_validate(row, from_attributes=True)
                for row in session.scalars(query.order_by(ClusterEventRow.seq))
            ]

    def open_console(self, name: str, member: str, incarnation: int = 0) -> StreamReader:
        """Open the console of a cluster VM. incarnation: the latest (0), or the one before it."""
        query = select(ClusterVmRow).where(ClusterVmRow.cluster == name, ClusterVmRow.name == member)
        with self.database.read() as session:
            find_cluster(session, name)
            row = session.scalars(query).one_or_none()
        if row is None:
            raise NotFound(f"the cluster {name} has no VM {member[:64]}")
        wanted = incarnation or max(1, row.incarnation)
        # The agent may send a console before its report.
        if not max(1, row.incarnation - 1) <= wanted <= row.incarnation + 1:
            raise NotFound(
                f"the console of incarnation {wanted} of {member} is not kept",
                hint=f"the present incarnation is {row.incarnation}; that before it is kept, too",
            )
        return self.streams.open(row.id, console_of(wanted), StreamName.CONSOLE)

    def assess(self, viewer: Viewer, spec: ClusterSpec) -> Assessment:
        """Compute how many VMs of a spec would run now, in place of a cluster of the same name.

        Raises InvalidSpec.
        """
        image, kinds = self._checked(viewer, spec)
        present = utc_now()
        with self.database.read() as session:
            snapshot = load_snapshot(session, self.lease, present)
        others = [cluster for cluster in snapshot.planner_view({}) if cluster.name != spec.name]
        guards = snapshot.backoffs(present)
        room = free_capacity(snapshot.nodes.values(), others, guards)
        placed: Counter[str] = Counter()
        for number in range(spec.range.max):
            place = room.place(placement_request(spec, frozenset(kinds), image))
            if not place.node:
                pending = spec.range.max - number
                return Assessment(placed=dict(placed), pending=pending, why=place.why)
            placed[place.node] += 1
        return Assessment(placed=dict(placed), pending=0)

    # -- changes

    def faults(self, viewer: Viewer, spec: ClusterSpec) -> builtins.list[Fault]:
        """All faults for which :meth:`apply` would refuse the spec."""
        try:
            self._checked(viewer, spec)
        except InvalidSpec as error:
            return builtins.list(error.faults)
        return []

    def apply(self, viewer: Viewer, spec: ClusterSpec) -> ApplyResult:
        """Create or change a cluster. The same spec and image again change nothing, even if the
        rollout has failed: see :meth:`retry`.

        Raises InvalidSpec with every fault, Conflict: the cluster of that name is being deleted.
        """
        image, kinds = self._checked(viewer, spec)
        try:
            return self._apply(viewer, spec, image, kinds)
        except IntegrityError:  # two concurrent requests created the cluster
            try:
                return self._apply(viewer, spec, image, kinds)
            except IntegrityError as error:
                raise Unavailable("database", f"the cluster was not stored: {error.orig}") from error

    def _checked(self, viewer: Viewer, spec: ClusterSpec) -> tuple[str, tuple[HypervisorKind, ...]]:
        """Resolve the image as the cluster's owner; return digest and hypervisor kinds.

        Raises InvalidSpec.
        """
        faults = builtins.list(self._pool_faults(spec))
        image, kinds = "", tuple(HypervisorKind)
        try:
            owner = self._owner_of(viewer, spec.name)
            image = self.images.resolve(owner, spec.image)
            kinds = self.images.kinds(owner, image)
        except (NotFound, InvalidRequest) as error:
            faults.append(unknown_image(error))
        if spec.hypervisor is not None and spec.hypervisor not in kinds:
            text = f"the image cannot be booted by {spec.hypervisor}, only by {', '.join(kinds)}"
            faults.append(Fault("hypervisor", "cannot_boot", text))
        elif why := check_cpus(spec.hypervisor, spec.cpus, shared=True) or check_image_cpus(
            spec.cpus, kinds, shared=True
        ):
            faults.append(Fault("cpus", "above_hypervisor", why))
        if faults:
            raise InvalidSpec("the cluster cannot run here as it is declared", faults=faults)
        return image, kinds

    def _pool_faults(self, spec: ClusterSpec) -> Iterator[Fault]:
        pools = self.config.pools
        if not pools:
            text = "this service knows no pool that clusters could join: its setting pools is empty"
            yield Fault("pool", "no_pool", text)
        elif spec.pool and spec.pool not in pools:
            known = ", ".join(pools)
            yield Fault("pool", "unknown_pool", f"there is no pool {spec.pool!r}; known are {known}")

    def _owner_of(self, viewer: Viewer, name: str) -> Viewer:
        """Return the viewer whose images the spec may use: the user who created the cluster.

        Only administrators act as another user.
        """
        if not viewer.admin:
            return viewer
        with self.database.read() as session:
            row = session.get(ClusterRow, name)
        if row is None or row.owner == viewer.user:
            return viewer
        return Viewer(row.owner, admin=True)

    def _apply(
        self, viewer: Viewer, spec: ClusterSpec, image: str, kinds: tuple[HypervisorKind, ...]
    ) -> ApplyResult:
        present = utc_now()
        with self.database.write() as session:
            try:
                # From here on the image stays: a concurrent removal waits, and finds the cluster.
                self.images.pin(session, Viewer(viewer.user, admin=True), image)
            except NotFound as error:
                faults = [unknown_image(error)]
                raise InvalidSpec("the cluster cannot run here", faults=faults) from error
            query = select(ClusterRow).where(ClusterRow.name == spec.name).with_for_update()
            row = session.scalars(query).one_or_none()
            outcome = ApplyOutcome.CREATED if row is None else ApplyOutcome.CHANGED
            if row is None:
                row = _new_cluster(viewer, spec, image, present)
                session.add(row)
                session.flush()
            else:
                _refuse_if_deleting(row)
                known = last_declared(session, row)
                old = ClusterSpec.model_validate(known.spec)
                if known.image == image and is_same_spec(old, spec):
                    return ApplyResult(outcome=ApplyOutcome.UNCHANGED, cluster=self._view(session, row))
                new_generation(session, row, spec, image, present)
                if isinstance(known, GenerationRow):
                    session.delete(known)
            row.kinds = [kind.value for kind in kinds]
            text = f"{outcome} by {viewer.user}: {row.target} VMs of {image}"
            record(session, row, HistoryEntry(outcome.upper(), message=text), present)
            session.flush()
            return ApplyResult(outcome=outcome, cluster=self._view(session, row))

    def scale(self, name: str, size: int, who: str) -> Cluster:
        """Change the number of VMs and nothing else.

        Raises Conflict (the cluster is being deleted), InvalidRequest (outside of its range).
        """
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            _refuse_if_deleting(row)
            spec = ClusterSpec.model_validate(row.spec)
            allowed = spec.range
            if isinstance(spec.size, SizeRange) and not allowed.min <= size <= allowed.max:
                text = f"the cluster {name} is declared for {allowed.min} to {allowed.max} VMs"
                fault = Fault("size", "out_of_range", f"{size} is not {allowed.min} to {allowed.max}")
                raise InvalidRequest(text, hint="apply another declaration", faults=[fault])
            if size != row.target:
                if not isinstance(spec.size, SizeRange):
                    resize(session, row, size, present)
                row.target, row.updated = size, present
                record(session, row, HistoryEntry("SCALED", message=f"{size} VMs, by {who}"), present)
                session.flush()
            return self._view(session, row)

    def wake(self, name: str, who: str) -> bool:
        """Start one VM in a cluster that autoscaling has reduced to 0, for a job seen elsewhere.

        A cluster that has VMs, or may have none, does not change. Return whether anything changed.
        """
        with self.database.write() as session:
            return autoscaling.wake(session, find_cluster(session, name, lock=True), who, utc_now())

    def drain(self, name: str, who: str) -> Cluster:
        """Let all VMs end with their jobs, and start none until :meth:`resume`."""
        return self._set_draining(name, True, HistoryEntry("DRAINING", message=f"asked for by {who}"))

    def resume(self, name: str, who: str) -> Cluster:
        """Start VMs again.  Raises Conflict: the cluster is being deleted."""
        return self._set_draining(name, False, HistoryEntry("RESUMED", message=f"by {who}"))

    def _set_draining(self, name: str, draining: bool, told: HistoryEntry) -> Cluster:
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            if not draining:
                _refuse_if_deleting(row)
            if row.draining != draining:
                row.draining, row.updated = draining, present
                record(session, row, told, present)
                session.flush()
            return self._view(session, row)

    def retry(self, name: str, who: str) -> Cluster:
        """Retry failures at once.

        Clear the backoff of the cluster's images, replace VMs that wait for a retry, and declare the
        generation again that was rolled back.

        Raises Conflict: the cluster is being deleted.
        """
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            _refuse_if_deleting(row)
            told = f"asked for by {who}"
            failed = last_declared(session, row)
            images = {row.image, failed.image}
            if isinstance(failed, GenerationRow):
                spec = ClusterSpec.model_validate(failed.spec)
                told += f": generation {failed.generation} is declared again"
                new_generation(session, row, spec, failed.image, present)
                row.kinds = failed.kinds
                session.delete(failed)
            mine = select(ClusterVmRow).where(ClusterVmRow.cluster == name).order_by(ClusterVmRow.id)
            nodes = set()
            for member in session.scalars(mine.with_for_update()):
                images.add(member.image)
                if member.phase == Phase.WAITING.value and member.goal == Goal.RUN.value:
                    member.goal = Goal.DRAIN.value
                    nodes.add(member.node)
            for node in sorted(nodes):  # in the order in which all transactions lock them
                bump_revision(session, node)
            clear(session, images)
            row.stalled, row.updated = 0, present
            record(session, row, HistoryEntry("RETRIED", message=told), present)
            session.flush()
            return self._view(session, row)

    def delete(self, name: str, goal: Goal, who: str) -> Cluster:
        """Delete the cluster once its VMs have ended, which drain or stop, as ``goal`` says.

        Repeating the call is no error; a drain may become a stop, but not the other way round.
        """
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            if row.deleting not in {goal.value, Goal.STOP.value}:
                row.deleting, row.updated = goal.value, present
                how = "now" if goal is Goal.STOP else "once its jobs have ended"
                record(session, row, HistoryEntry("DELETING", message=f"{how}, by {who}"), present)
                session.flush()
            return self._view(session, row)


def _refuse_if_deleting(row: ClusterRow) -> None:
    if row.deleting:
        raise Conflict(
            f"the cluster {row.name} is being deleted",
            hint="declare it again once it is gone; `now` does not wait for its jobs",
        )


def _new_cluster(viewer: Viewer, spec: ClusterSpec, image: str, present: datetime) -> ClusterRow:
    return ClusterRow(
        name=spec.name,
        owner=viewer.user,
        spec=spec.model_dump(mode="json"),
        image=image,
        kinds=[],
        target=spec.range.min,
        created=present,
        updated=present,
    )
