"""Base class of all parts of the repository: its collaborators."""

from __future__ import annotations

from repository.blobs import BlobStore
from repository.builds import Builds
from repository.clusters.service import Clusters
from repository.database import Database
from repository.images import Images
from repository.objects import ObjectStore
from repository.streams import StreamStore
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
