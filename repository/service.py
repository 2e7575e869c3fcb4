"""The job repository: operations on jobs, blobs, streams and nodes for API and worker.

Every method may also raise ``Unavailable("database", …)``; foreign exceptions are translated.
``owner=None`` means any owner (for agents and the worker); with an owner, another owner's job is
``NotFound``.
"""

from __future__ import annotations

from repository.db.database import Database
from repository.images import Images
from repository.jobs.attempts import Attempts
from repository.jobs.condor_jobs import CondorJobs
from repository.jobs.condor_sync import CondorSync, JobToRemove
from repository.jobs.queries import JobQueries
from repository.jobs.streams import StreamReader, StreamStore
from repository.jobs.submissions import Submissions
from repository.jobs.views import PublishArray, SubmissionResult
from repository.migrations import upgrade
from repository.storage.blobs import BlobReader, BlobStore
from repository.storage.objects import open_objects
from vmjobs.config import Config

__all__ = [
    "BlobReader",
    "JobToRemove",
    "PublishArray",
    "Repository",
    "StreamReader",
    "SubmissionResult",
    "open_repository",
]


class Repository(Submissions, JobQueries, Attempts, CondorJobs, CondorSync):
    """Jobs, their files, and the nodes that run them.

    ``images`` has the images they boot, ``builds`` the builds of images, ``clusters`` the virtual
    clusters.

    Safe to share between threads.

    users (submissions, queries): submit, cancel, change_jobs, job, version, jobs, events, outputs,
    open_stream, open_output.
    users, for input files (blob_owners): put_blob, has_blob, blob_size.
    agents (attempts): claim, report, keep, append, put_output, open_input.
    agents, for transparent jobs (condor_jobs): claim_condor_job, keep_condor_job,
    condor_job_not_resumed, end_condor_job.
    nodes (nodes): put_node, live_nodes, node_page, node.
    worker (condor_sync): begin_dispatch, record_condor, note_unavailable, observe, observe_waiting, and
    the work lists; collect (blob_owners).
    """

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
    database = Database(config.database)
    return Repository(
        database,
        BlobStore(objects, config.data_dir / "spool"),
        StreamStore(config.data_dir / "streams", config.max_stream_bytes),
        Images(database, objects, config),
        config,
        objects,
    )
