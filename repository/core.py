"""Base class of all parts of the repository: its collaborators."""

from __future__ import annotations

from repository.builds.requests import Builds
from repository.clusters.service import Clusters
from repository.db.database import Database
from repository.images import Images
from repository.jobs.streams import StreamStore
from repository.storage.blobs import BlobStore
from repository.storage.objects import ObjectStore
from vmjobs.config import Config


class RepositoryCore:
    """Holds the collaborators. Nothing is opened here; safe to share between threads."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        streams: StreamStore,
        images: Images,
        config: Config,
        objects: ObjectStore,
    ) -> None:
        self.database = database
        self.blobs = blobs
        self.streams = streams
        self.images = images
        self.builds = Builds(database)
        self.clusters = Clusters(database, streams, images, config)
        self.config = config
        self.objects = objects
