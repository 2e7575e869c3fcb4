"""Specifications of clusters: checks them, assesses them, and applies them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from repository.clusters.core import node_lease, refuse_if_deleting
from repository.clusters.generations import is_same_spec, last_declared, new_generation
from repository.clusters.history import HistoryEntry, record
from repository.clusters.queries import load_cluster
from repository.clusters.snapshots import load_snapshot
from repository.clusters.tables import ClusterRow, GenerationRow
from repository.db.database import Database
from repository.images import Viewer
from repository.images.catalog import Catalog
from repository.images.holdings import pin_image
from repository.jobs.validation import unknown_image
from vmjobs.cluster.plan import free_capacity, placement_request
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import ApplyOutcome, ApplyResult, Assessment
from vmjobs.config import Config
from vmjobs.errors import Fault, InvalidRequest, InvalidSpec, NotFound, Unavailable
from vmjobs.model import HypervisorKind, check_cpus, check_image_cpus
from vmjobs.model import now as utc_now


@dataclass(frozen=True)
class ClusterSpecs:
    """Specifications of clusters, as operators declare them."""

    database: Database
    catalog: Catalog
    config: Config

    def assess(self, viewer: Viewer, spec: ClusterSpec) -> Assessment:
        """Compute how many VMs of a spec would run now, in place of a cluster of the same name.

        Raises InvalidSpec.
        """
        image, kinds = self._checked(viewer, spec)
        present = utc_now()
        with self.database.read() as session:
            snapshot = load_snapshot(session, node_lease(self.config), present)
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

    def faults(self, viewer: Viewer, spec: ClusterSpec) -> list[Fault]:
        """All faults for which :meth:`apply` would refuse the spec."""
        try:
            self._checked(viewer, spec)
        except InvalidSpec as error:
            return list(error.faults)
        return []

    def apply(self, viewer: Viewer, spec: ClusterSpec) -> ApplyResult:
        """Create or change a cluster. The same spec and image again change nothing, even if the
        rollout has failed: see :meth:`ClusterActions.retry`.

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
        faults = list(self._pool_faults(spec))
        image, kinds = "", tuple(HypervisorKind)
        try:
            owner = self._owner_of(viewer, spec.name)
            image = self.catalog.resolve(owner, spec.image)
            kinds = self.catalog.parsed_manifest(owner, image).hypervisors
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
                pin_image(session, Viewer(viewer.user, admin=True), image)
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
                refuse_if_deleting(row)
                known = last_declared(session, row)
                old = ClusterSpec.model_validate(known.spec)
                if known.image == image and is_same_spec(old, spec):
                    return ApplyResult(
                        outcome=ApplyOutcome.UNCHANGED, cluster=load_cluster(session, self.config, row)
                    )
                new_generation(session, row, spec, image, present)
                if isinstance(known, GenerationRow):
                    session.delete(known)
            row.kinds = [kind.value for kind in kinds]
            text = f"{outcome} by {viewer.user}: {row.target} VMs of {image}"
            record(session, row, HistoryEntry(outcome.upper(), message=text), present)
            session.flush()
            return ApplyResult(outcome=outcome, cluster=load_cluster(session, self.config, row))


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
