"""The tables. Rows are storage only: ``vmjobs.model`` defines jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from repository.db.database import UtcDateTime

ID = String(32)
DIGEST = String(71)
STATE = String(16)
#: SQLite auto-increments only an INTEGER PRIMARY KEY.
BIG_ID = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base of all tables; constraints have names, so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(),
    }


class CondorJobRow(Base):
    """A transparent job whose VM is checkpointed when the job is vacated.

    id: derived from HTCondor's job id. owner: for the quota. attempt: the current run. failed: the last
    run that failed to resume from the checkpoint. heard: time of the last report by a node.
    """

    __tablename__ = "condor_jobs"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    attempt: Mapped[str] = mapped_column(ID)
    failed: Mapped[str] = mapped_column(ID, default="")
    heard: Mapped[datetime] = mapped_column(index=True)


class SubmissionRow(Base):
    """One ``POST /v1/jobs``: the spec that all jobs of the array share.

    forgotten: the scheduler's spool directory of the array is gone.
    """

    __tablename__ = "submissions"
    __table_args__ = (UniqueConstraint("owner", "key"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    key: Mapped[str | None] = mapped_column(String(255))
    body_digest: Mapped[str] = mapped_column(DIGEST)
    created: Mapped[datetime]
    count: Mapped[int]
    image_digest: Mapped[str] = mapped_column(DIGEST, index=True)
    spec: Mapped[dict[str, Any]]
    forgotten: Mapped[bool] = mapped_column(default=False, index=True)


class JobRow(Base):
    """A job as it is now.

    version: grows with every change that a client can see.
    settled: final, and nothing of it is left at the scheduler.
    dispatched: when its submission to the scheduler began; set before the scheduler is called.
    batch_*: the scheduler's last observation, and since when it has been the same.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "owner", "id"),
        Index(None, "owner", "created"),
        Index(None, "state", "updated"),
        Index(None, "array_id", "index"),
        Index(None, "settled", "state"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    array_id: Mapped[str] = mapped_column(ID, ForeignKey("submissions.id", ondelete="CASCADE"))
    index: Mapped[int]
    owner: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(STATE)
    reason_code: Mapped[str] = mapped_column(String(32))
    reason_message: Mapped[str] = mapped_column(Text, default="")
    reason_actor: Mapped[str] = mapped_column(String(16))
    created: Mapped[datetime]
    updated: Mapped[datetime]
    version: Mapped[int] = mapped_column(default=1)
    events_count: Mapped[int] = mapped_column(default=0)
    settled: Mapped[bool] = mapped_column(default=False)

    attempts: Mapped[int] = mapped_column(default=0)
    attempt: Mapped[str] = mapped_column(ID, default="")

    dispatched: Mapped[datetime | None]
    schedd: Mapped[str | None] = mapped_column(String(255))
    cluster: Mapped[int | None]
    proc: Mapped[int | None]
    grid_job_id: Mapped[str] = mapped_column(String(512), default="")
    batch_status: Mapped[str] = mapped_column(STATE, default="")
    batch_reason: Mapped[str] = mapped_column(Text, default="")
    batch_since: Mapped[datetime | None]
    batch_exit: Mapped[str] = mapped_column(String(32), default="")

    submission: Mapped[SubmissionRow] = relationship()


class EventRow(Base):
    """One line of a job's history."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    state: Mapped[str] = mapped_column(STATE)
    reason_code: Mapped[str] = mapped_column(String(32))
    reason_message: Mapped[str] = mapped_column(Text, default="")
    reason_actor: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[str] = mapped_column(ID, default="")


class AttemptRow(Base):
    """One attempt of a node to run a job.

    reached: the last state that the agent itself reported, ``""`` before its first report.
    heard: time of the agent's last contact.  ended: when it reported that its VM is gone.
    seen_running: the scheduler reported the job as running after the claim.
    seconds, bytes, cpu_seconds: from reports.
    ending: how it ended by itself, state and reason, while the job was being canceled.
    """

    __tablename__ = "attempts"
    __table_args__ = (Index(None, "job_id", "number"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]
    node: Mapped[str] = mapped_column(String(255))
    claimed: Mapped[datetime]
    heard: Mapped[datetime]
    ended: Mapped[datetime | None]
    reached: Mapped[str] = mapped_column(STATE, default="")
    seen_running: Mapped[bool] = mapped_column(default=False)
    hypervisor: Mapped[str | None] = mapped_column(STATE)
    exit: Mapped[dict[str, Any] | None]
    ending: Mapped[dict[str, Any] | None]
    seconds: Mapped[dict[str, Any]] = mapped_column(default=dict)
    bytes: Mapped[dict[str, Any]] = mapped_column(default=dict)
    cpu_seconds: Mapped[float] = mapped_column(Double, default=0.0)
    rejected: Mapped[list[Any]] = mapped_column(default=list)


class OutputRow(Base):
    """A file that an attempt delivered."""

    __tablename__ = "outputs"
    __table_args__ = (UniqueConstraint("attempt_id", "path"), Index(None, "digest"))

    id: Mapped[int] = mapped_column(BIG_ID, primary_key=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"))
    path: Mapped[str] = mapped_column(String(255))
    size: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(DIGEST)


class BlobOwnerRow(Base):
    """An owner of a blob, who has sent its bytes, or whose job has delivered them.

    The row is inserted before the object is stored, and after the digest was computed. used: a job has
    the blob as an input or output, so it stays; an unused blob counts against the owner's quota, until
    it was not ``touched`` for a day.
    """

    __tablename__ = "blob_owners"
    __table_args__ = (
        Index(None, "digest"),
        Index(None, "owner", "used"),
        Index(None, "used", "touched"),
    )

    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    used: Mapped[bool]
    touched: Mapped[datetime]


class NodeRow(Base):
    """An execute node as it last announced itself."""

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    heard: Mapped[datetime] = mapped_column(index=True)
    description: Mapped[dict[str, Any]]


class TokenRow(Base):
    """A token for the API: see :class:`repository.tokens.TokenRecord`."""

    __tablename__ = "api_tokens"

    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(255), index=True)
    issued: Mapped[datetime]
    expires: Mapped[datetime] = mapped_column(index=True)
    revoked: Mapped[datetime | None]


class BuildRow(Base):
    """An image that a builder makes.

    admin: the requesting user may write to the library. progress: in thousandths.
    attempts: how often a builder began it and did not postpone it. generation: incremented each time
    it is begun or postponed, which fences off builders of older generations. naming: its image is being
    published. sent: when a message was last sent for it, ``sends`` times since it was last begun.
    """

    __tablename__ = "builds"
    __table_args__ = (UniqueConstraint("owner", "key"), Index(None, "owner", "id"))

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    key: Mapped[str | None] = mapped_column(String(255))
    admin: Mapped[bool]
    request: Mapped[dict[str, Any]]
    name: Mapped[str] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(STATE, index=True)
    step: Mapped[str] = mapped_column(String(200), default="")
    progress: Mapped[int] = mapped_column(default=0)
    code: Mapped[str] = mapped_column(String(32), default="")
    message: Mapped[str] = mapped_column(Text, default="")
    hint: Mapped[str] = mapped_column(Text, default="")
    digest: Mapped[str] = mapped_column(DIGEST, default="")
    attempts: Mapped[int] = mapped_column(default=0)
    generation: Mapped[int] = mapped_column(default=0)
    naming: Mapped[bool] = mapped_column(default=False)
    sent: Mapped[datetime]
    sends: Mapped[int] = mapped_column(default=1)
    created: Mapped[datetime]
    updated: Mapped[datetime]
