"""The job repository: its services, each of which is handed what it needs.

Every method may also raise ``Unavailable("database", …)``; foreign exceptions are translated.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from repository.builds.requests import Builds
from repository.clusters.actions import ClusterActions
from repository.clusters.assignments import ClusterAssignments
from repository.clusters.logins import ClusterLogins
from repository.clusters.queries import ClusterQueries
from repository.clusters.reconciler import ClusterReconciler
from repository.clusters.specs import ClusterSpecs
from repository.db.database import Database
from repository.images.catalog import Catalog
from repository.images.checkpoints import Checkpoints
from repository.images.content_reader import ContentReader
from repository.images.garbage_collection import GarbageCollector
from repository.images.prefetching import Prefetcher
from repository.images.publishing import Publisher
from repository.images.segments import SegmentStore
from repository.images.serving import SegmentServer
from repository.images.uploads import Uploads
from repository.jobs.actions import JobActions
from repository.jobs.attempts import Attempts
from repository.jobs.condor_jobs import CondorJobs
from repository.jobs.condor_sync import CondorSync
from repository.jobs.queries import JobQueries
from repository.jobs.streams import StreamStore
from repository.jobs.submissions import Submissions
from repository.migrations import upgrade
from repository.nodes import Nodes
from repository.storage.blob_owners import BlobOwners
from repository.storage.blobs import BlobStore
from repository.storage.objects import ORPHAN_SECONDS, ObjectStore, open_objects
from vmjobs.config import Config


class Repository:
    """The services of the API and the worker. All of them are safe to share between threads."""

    def __init__(
        self,
        config: Config,
        database: Database,
        objects: ObjectStore,
        *,
        orphan_seconds: float = ORPHAN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the services; nothing is opened."""
        self.config = config
        self.database = database
        self.objects = objects
        self.blobs = BlobStore(objects, config.data_dir / "spool")
        self.streams = StreamStore(config.data_dir / "streams", config.max_stream_bytes)
        self.nodes = Nodes(database)
        # images
        self.catalog = Catalog(database, config)
        self.uploads = Uploads(database, config)
        self.segments = SegmentStore(database, objects, self.uploads, config, orphan_seconds)
        self.contents = ContentReader(database, self.catalog, self.segments)
        self.segment_server = SegmentServer(database, objects, self.contents, clock)
        self.publisher = Publisher(database, self.contents, config)
        self.prefetcher = Prefetcher(database)
        self.builds = Builds(database)
        # jobs
        self.blob_owners = BlobOwners(database, self.blobs, config, orphan_seconds)
        self.submissions = Submissions(database, self.catalog, self.nodes, self.blob_owners, config)
        self.jobs = JobQueries(database, self.blobs, self.streams)
        self.job_actions = JobActions(database)
        self.attempts = Attempts(database, self.blobs, self.blob_owners, self.streams, config)
        self.checkpoints = Checkpoints(database, self.segments)
        self.condor_jobs = CondorJobs(database, config)
        self.condor_sync = CondorSync(database)
        # virtual clusters
        self.clusters = ClusterQueries(database, self.streams, config)
        self.cluster_specs = ClusterSpecs(database, self.catalog, config)
        self.cluster_actions = ClusterActions(database, config)
        self.cluster_logins = ClusterLogins(database)
        self.assignments = ClusterAssignments(database, self.streams)
        self.reconciler = ClusterReconciler(database, self.streams, config)

        self.garbage_collector = GarbageCollector(
            database, objects, self.blob_owners, config, orphan_seconds
        )

    def close(self) -> None:
        """Close the database's idle connections."""
        self.database.close()


def open_repository(config: Config, *, migrate: bool = True) -> Repository:
    """Open a repository on the database and directories that ``config`` names.

    ``migrate``: upgrade the database schema first, and check that the storage works.
    Raises Unavailable("database"), Unavailable("storage"), ConfigError.
    """
    objects = open_objects(config)
    if migrate:
        upgrade(config.database)
        objects.check()
    return Repository(config, Database(config.database), objects)
