"""Clusters as their operators use them: declare, look, scale, drain, delete."""

from __future__ import annotations

import builtins
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import flag_modified

from repository.clusters.core import ClusterCore, locked_cluster, no_cluster
from repository.clusters.history import KEPT, Told, record
from repository.clusters.loading import cluster_view, load, member_view, nodes_now
from repository.clusters.tables import ClusterEventRow, ClusterRow, MemberRow
from repository.images import Viewer
from repository.streams import StreamReader
from repository.validation import unknown_image
from vmjobs.cluster.member import Goal, MemberState
from vmjobs.cluster.plan import room_on, wanted_by
from vmjobs.cluster.spec import ClusterSpec, Size
from vmjobs.cluster.wire import Applied, Assessment, Cluster, ClusterEvent, Outcome
from vmjobs.errors import Conflict, Fault, InvalidRequest, InvalidSpec, NotFound, Unavailable
from vmjobs.model import HypervisorKind, StreamName
from vmjobs.model import now as utc_now


class Declaring(ClusterCore):
    """The operators' part. Names are of clusters; all but apply, list, assess raise NotFound."""

    # -- looking

    def list(self) -> builtins.list[Cluster]:
        """All clusters, by name; without their members."""
        ups = select(MemberRow.cluster, func.count()).where(MemberRow.state == MemberState.UP.value)
        with self.database.read() as session:
            up = {row[0]: row[1] for row in session.execute(ups.group_by(MemberRow.cluster))}
            rows = session.scalars(select(ClusterRow).order_by(ClusterRow.name))
            return [cluster_view(row, up.get(row.name, 0)) for row in rows]

    def get(self, name: str) -> Cluster:
        """One cluster with its members."""
        with self.database.read() as session:
            row = session.get(ClusterRow, name)
            if row is None:
                raise no_cluster(name)
            return self._view(session, row)

    def _view(self, session: Session, row: ClusterRow) -> Cluster:
        nodes = nodes_now(session, self.lease, utc_now())
        alive = {name for name, node in nodes.items() if node.alive}
        rows = session.scalars(select(MemberRow).where(MemberRow.cluster == row.name))
        members = [member_view(member, member.node in alive) for member in rows]
        members.sort(key=lambda member: int(member.name.rpartition("-")[2]))
        return cluster_view(row, sum(m.state is MemberState.UP for m in members), members)

    def events(self, name: str, after: int = 0) -> builtins.list[ClusterEvent]:
        """The last lines of the cluster's history, past event number ``after``, oldest first."""
        with self.database.read() as session:
            cluster = session.get(ClusterRow, name)
            if cluster is None:
                raise no_cluster(name)
            after = max(after, cluster.events_count - KEPT)
            query = select(ClusterEventRow).where(
                ClusterEventRow.cluster == name, ClusterEventRow.seq > after
            )
            return [
                ClusterEvent(
                    seq=row.seq,
                    time=row.time,
                    member=row.member,
                    node=row.node,
                    state=row.state,
                    code=row.code,
                    message=row.message,
                )
                for row in session.scalars(query.order_by(ClusterEventRow.seq))
            ]

    def open_console(self, name: str, member: str, incarnation: int = 0) -> StreamReader:
        """What a member's machine said. incarnation: of which; 0: the last one; one before is kept."""
        query = select(MemberRow).where(MemberRow.cluster == name, MemberRow.name == member)
        with self.database.read() as session:
            if session.get(ClusterRow, name) is None:
                raise no_cluster(name)
            row = session.scalars(query).one_or_none()
        if row is None:
            raise NotFound(f"the cluster {name} has no member {member[:64]}")
        wanted = incarnation or max(1, row.incarnation)
        # The agent may be quicker with a console than with its report.
        if not max(1, row.incarnation - 1) <= wanted <= row.incarnation + 1:
            raise NotFound(
                f"the console of machine {wanted} of {member} is not kept",
                hint=f"it is at its machine {row.incarnation}; of the one before it is kept, too",
            )
        return self.streams.open(row.id, console_of(wanted), StreamName.CONSOLE)

    def assess(self, viewer: Viewer, spec: ClusterSpec) -> Assessment:
        """How much of a declaration would run now, in place of what a cluster of its name has.

        Raises InvalidSpec.
        """
        _, kinds = self._checked(viewer, spec)
        present = utc_now()
        with self.database.read() as session:
            world = load(session, self.lease, present)
        others = [cluster for cluster in world.planned({}) if cluster.name != spec.name]
        room = room_on(world.nodes.values(), others)
        placed: Counter[str] = Counter()
        for number in range(spec.range.max):
            place = room.place(wanted_by(spec, frozenset(kinds)))
            if not place.node:
                pending = spec.range.max - number
                return Assessment(placed=dict(placed), pending=pending, why=place.why)
            placed[place.node] += 1
        return Assessment(placed=dict(placed), pending=0)

    # -- declaring

    def faults(self, viewer: Viewer, spec: ClusterSpec) -> builtins.list[Fault]:
        """Everything that keeps a declaration from being applied here."""
        try:
            self._checked(viewer, spec)
        except InvalidSpec as error:
            return builtins.list(error.faults)
        return []

    def apply(self, viewer: Viewer, spec: ClusterSpec) -> Applied:
        """Have this cluster. The same declaration again, of the same image, changes nothing.

        Raises InvalidSpec with every fault, Conflict: the cluster of that name is being deleted.
        """
        image, kinds = self._checked(viewer, spec)
        try:
            return self._apply(viewer, spec, image, kinds)
        except IntegrityError:  # declared twice at once, for the first time
            try:
                return self._apply(viewer, spec, image, kinds)
            except IntegrityError as error:
                raise Unavailable("database", f"the cluster was not stored: {error.orig}") from error

    def _checked(self, viewer: Viewer, spec: ClusterSpec) -> tuple[str, tuple[HypervisorKind, ...]]:
        """The image, as the cluster's owner sees it, and what boots it.  Raises InvalidSpec."""
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
        if faults:
            raise InvalidSpec("the cluster cannot be here as it is declared", faults=faults)
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
        """On whose behalf the image is looked for: the first one who declared the cluster.

        Only those who may declare look through another's eyes.
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
    ) -> Applied:
        present = utc_now()
        with self.database.write() as session:
            try:
                # From here on the image cannot go: whoever removes it waits, and finds the cluster.
                self.images.pin(session, Viewer(viewer.user, admin=True), image)
            except NotFound as error:
                faults = [unknown_image(error)]
                raise InvalidSpec("the cluster cannot be here", faults=faults) from error
            query = select(ClusterRow).where(ClusterRow.name == spec.name).with_for_update()
            row = session.scalars(query).one_or_none()
            outcome = Outcome.CREATED if row is None else Outcome.CHANGED
            if row is None:
                row = _new(viewer, spec, image, present)
                session.add(row)
                session.flush()
            else:
                _refuse_if_deleting(row)
                known = ClusterSpec.model_validate(row.spec)
                if row.image == image and _same(_plain(known), _plain(spec)):
                    return Applied(outcome=Outcome.UNCHANGED, cluster=self._view(session, row))
                _change(session, row, spec, image, present)
            row.kinds = [kind.value for kind in kinds]
            text = f"{outcome} by {viewer.user}: {row.target} machines of {image}"
            record(session, row, Told(outcome.upper(), message=text), present)
            session.flush()
            return Applied(outcome=outcome, cluster=self._view(session, row))

    def scale(self, name: str, size: int, who: str) -> Cluster:
        """Have another number of machines; nothing else changes.

        Raises Conflict (it is being deleted), InvalidRequest: outside of the range declared.
        """
        present = utc_now()
        with self.database.write() as session:
            row = locked_cluster(session, name)
            _refuse_if_deleting(row)
            spec = ClusterSpec.model_validate(row.spec)
            allowed = spec.range
            if isinstance(spec.size, Size) and not allowed.min <= size <= allowed.max:
                text = f"the cluster {name} is declared for {allowed.min} to {allowed.max} machines"
                fault = Fault("size", "out_of_range", f"{size} is not {allowed.min} to {allowed.max}")
                raise InvalidRequest(text, hint="apply another declaration", faults=[fault])
            if size != row.target:
                if not isinstance(spec.size, Size):
                    _change(session, row, spec.model_copy(update={"size": size}), row.image, present)
                row.target, row.updated = size, present
                record(session, row, Told("SCALED", message=f"{size} machines, by {who}"), present)
                session.flush()
            return self._view(session, row)

    def drain(self, name: str, who: str) -> Cluster:
        """Let all machines end with their jobs, and start none until :meth:`resume`."""
        return self._set_draining(name, True, Told("DRAINING", message=f"asked for by {who}"))

    def resume(self, name: str, who: str) -> Cluster:
        """Start machines again.  Raises Conflict: it is being deleted."""
        return self._set_draining(name, False, Told("RESUMED", message=f"by {who}"))

    def _set_draining(self, name: str, draining: bool, told: Told) -> Cluster:
        present = utc_now()
        with self.database.write() as session:
            row = locked_cluster(session, name)
            if not draining:
                _refuse_if_deleting(row)
            if row.draining != draining:
                row.draining, row.updated = draining, present
                record(session, row, told, present)
                session.flush()
            return self._view(session, row)

    def delete(self, name: str, goal: Goal, who: str) -> Cluster:
        """Have the cluster gone once its machines are, which end as ``goal`` says: drain, or stop.

        Repeating that is no error; who wants it now after all may say so, and not the other way.
        """
        present = utc_now()
        with self.database.write() as session:
            row = locked_cluster(session, name)
            if row.deleting not in {goal.value, Goal.STOP.value}:
                row.deleting, row.updated = goal.value, present
                how = "now" if goal is Goal.STOP else "once its jobs have ended"
                record(session, row, Told("DELETING", message=f"{how}, by {who}"), present)
                session.flush()
            return self._view(session, row)


def console_of(incarnation: int) -> str:
    """Under which attempt a machine's console is kept."""
    return f"{incarnation:032x}"


def _refuse_if_deleting(row: ClusterRow) -> None:
    if row.deleting:
        raise Conflict(
            f"the cluster {row.name} is being deleted",
            hint="declare it again once it is gone; `now` does not wait for its jobs",
        )


def _new(viewer: Viewer, spec: ClusterSpec, image: str, present: datetime) -> ClusterRow:
    return ClusterRow(
        name=spec.name,
        owner=viewer.user,
        spec=spec.model_dump(mode="json"),
        image=image,
        kinds=[],
        generation=1,
        target=spec.range.min,
        draining=False,
        deleting="",
        stalled=0,
        events_count=0,
        created=present,
        updated=present,
    )


def _change(
    session: Session, row: ClusterRow, spec: ClusterSpec, image: str, present: datetime
) -> None:
    """A new generation. Members that are what it asks for become members of it."""
    if row.image == image and _same(_machine(row.spec), _machine(_plain(spec))):
        mine = update(MemberRow).where(MemberRow.cluster == row.name)
        mine = mine.where(MemberRow.generation == row.generation)
        session.execute(mine.values(generation=row.generation + 1))
    allowed = spec.range
    row.target = min(max(row.target, allowed.min), allowed.max)
    row.spec, row.image = _plain(spec), image
    flag_modified(row, "spec")  # or 1 in place of True would be no change to SQLAlchemy, too
    row.generation += 1
    row.updated = present


def _plain(spec: ClusterSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both say the same. To Python 1 and True are equal, to HTCondor they are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _machine(spec: dict[str, Any]) -> dict[str, Any]:
    """What a declaration says of each machine."""
    return {name: value for name, value in spec.items() if name not in {"size", "image"}}
