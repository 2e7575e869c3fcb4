"""The job repository: what the API and the worker do with jobs, blobs, streams and nodes.

Every method may also raise ``Unavailable("database", …)``; foreign exceptions never come out.
``owner=None`` means: whoever owns it (agents and the worker); with an owner, another owner's job
is ``NotFound``.
"""

from __future__ import annotations

from repository.attempts import Attempts
from repository.batch import Batch, Leftover
from repository.blobs import BlobReader, BlobStore
from repository.condor_jobs import CondorJobs
from repository.database import Database
from repository.images import Images
from repository.migrations import upgrade
from repository.objects import open_objects
from repository.reading import Reading
from repository.streams import StreamReader, StreamStore
from repository.submissions import Submissions
from repository.views import JobPage, OutputList, Publish, Submitted
from vmjobs.config import Config

__all__ = [
    "BlobReader",
    "JobPage",
    "Leftover",
    "OutputList",
    "Publish",
    "Repository",
    "StreamReader",
    "Submitted",
    "open_repository",
]


class Repository(Submissions, Reading, Attempts, CondorJobs, Batch):
    """Jobs, their files, and the nodes that run them.

    ``images`` has the images they boot, ``builds`` those that are to be built, ``clusters`` the
    virtual clusters.

    Safe to share between threads.

    users (submissions, reading): submit, cancel, change_jobs, job, version, jobs, events, outputs,
    open_stream, open_output.
    users, of their input files (possession): put_blob, has_blob, blob_size.
    agents (attempts): claim, report, keep, append, put_output, open_input.
    agents, of jobs that HTCondor alone knows (condor_jobs): claim_condor_job, keep_condor_job,
    condor_job_not_resumed, end_condor_job.
    nodes (nodes): put_node, nodes, node.
    worker (batch): begin_dispatch, record_condor, note_unavailable, observe, observe_waiting, and
    the lists of what there is to do; collect (possession).
    """

    def close(self) -> None:
        """Close the database's idle connections."""
        self.database.close()


def open_repository(config: Config, *, migrate: bool = True) -> Repository:
    """A repository on the database and directories that ``config`` names.

    ``migrate``: bring the database's schema up to date first, and ask the storage whether it works.
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
