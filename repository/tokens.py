"""A register of API tokens, and of those that were revoked before they expire.

A token is recorded when it is issued, or else at its first use: it may be issued before there is a
database. Tokens of single jobs are not recorded: they end with their jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, select

from repository.db.database import Database
from repository.db.ids import full_id
from repository.db.models import TokenRow
from repository.db.sql import add_missing
from repository.db.views import view_of
from vmjobs.errors import NotFound, Unauthenticated, Unavailable
from vmjobs.model import FrozenModel
from vmjobs.model import now as utc_now

log = logging.getLogger(__name__)

#: Seconds after which every process of the service knows that a token was revoked.
REFRESH_SECONDS: Final = 10.0
#: How long expired tokens are still listed.
LIST_EXPIRED_FOR: Final = timedelta(days=30)
#: Number of recorded tokens that a process caches.
MAX_RECORDED: Final = 65536


class TokenRecord(FrozenModel):
    """The record of a token; the token itself is not stored.

    id: its ``jti``. kind: ``user``, ``admin``, ``node`` or ``rooster``. subject: its user or node.
    """

    id: str
    kind: str
    subject: str
    issued: datetime
    expires: datetime
    revoked: datetime | None = None


class TokenRegister:
    """The tokens in the database.  All methods may raise Unavailable("database")."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, token: TokenRecord) -> None:
        """Record a token; repeating it changes nothing. Deletes tokens that expired long ago."""
        with self._database.write() as session:
            session.execute(delete(TokenRow).where(TokenRow.expires < utc_now() - LIST_EXPIRED_FOR))
            add_missing(session, TokenRow, [token.model_dump()])

    def tokens(self, subject: str | None = None, *, everything: bool = False) -> list[TokenRecord]:
        """Tokens by subject, the newest first; everything: include revoked and expired ones."""
        query = select(TokenRow).order_by(TokenRow.subject, TokenRow.issued.desc(), TokenRow.id)
        if subject is not None:
            query = query.where(TokenRow.subject == subject)
        if not everything:
            query = query.where(TokenRow.revoked.is_(None), TokenRow.expires > utc_now())
        with self._database.read() as session:
            return [view_of(TokenRecord, row) for row in session.scalars(query)]

    def revoke(self, ids: Sequence[str]) -> list[TokenRecord]:
        """Revoke all these tokens, or none; tokens that were revoked before stay revoked.

        ids: or prefixes of at least six characters.
        Raises:
            AmbiguousId: several ids begin with one of them.
            NotFound: no id does.
        """
        with self._database.write() as session:
            rows = []
            for text in ids:
                row = session.get(TokenRow, full_id(session, TokenRow.id, text))
                if row is None:
                    raise NotFound(f"there is no token {text}", hint="vmjobs token list --all")
                rows.append(row)
            for row in rows:
                row.revoked = row.revoked or utc_now()
            return [view_of(TokenRecord, row) for row in rows]

    def revoked(self) -> frozenset[str]:
        """The ids of the revoked tokens that have not expired."""
        query = select(TokenRow.id).where(TokenRow.revoked.is_not(None), TokenRow.expires > utc_now())
        with self._database.read() as session:
            return frozenset(session.scalars(query))


class TokenChecker:
    """Refuses revoked tokens.  Safe to share between threads."""

    def __init__(self, register: TokenRegister) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._revoked: frozenset[str] | None = None
        self._due = 0.0
        self._recorded: set[str] = set()

    def check(self, token: TokenRecord) -> None:
        """Refuse a token that was revoked at least ``REFRESH_SECONDS`` ago; record a new one.

        While the database does not answer, the last known revocations apply.

        Raises:
            Unauthenticated: the token was revoked.
            Unavailable: revocations were never read, and the database does not answer.
        """
        if token.id in self._known_revoked():
            raise Unauthenticated("the token was revoked", hint="get a new one")
        if token.id in self._recorded:
            return
        try:
            self._register.record(token)
        except Unavailable as error:
            log.warning("cannot record a token of %s yet: %s", token.subject, error)
            return
        if len(self._recorded) >= MAX_RECORDED:
            self._recorded.clear()
        self._recorded.add(token.id)

    def _known_revoked(self) -> frozenset[str]:
        with self._lock:
            if self._revoked is None or time.monotonic() >= self._due:
                try:
                    self._revoked = self._register.revoked()
                except Unavailable:
                    if self._revoked is None:
                        raise
                self._due = time.monotonic() + REFRESH_SECONDS
            return self._revoked
