"""IDTOKENS for machines of virtual clusters, made with a signing key of their own.

Each pool has a key that signs nothing else: taking it away from the pool's collector puts an end to all
tokens of its clusters at once, and to nothing else.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from condor import names
from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import Unavailable, VMJobsError
from vmjobs.ports import PoolMachine
from vmjobs.subprocess import run

#: All that such a token is good for: sending machine ads, and being reached by way of the collector.
AUTHORIZATION: Final = "ADVERTISE_STARTD"

_SECONDS: Final = 30.0
#: Whom tokens are made for.
USER: Final = re.compile(
    rf"{names.MEMBER_USER}[a-z][a-z0-9-]{{0,62}}\.[0-9a-f]{{32}}\.[1-9][0-9]{{0,9}}"
)
_DOMAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class CondorMinter:
    """Implements :class:`vmjobs.ports.Minter`.

    key_dir: a signing key for each pool, in a file of the pool's name, which this process's user owns
    and nobody else can read. domains: the trust domain of each pool.
    """

    def __init__(self, key_dir: Path, domains: Mapping[str, str]) -> None:
        self._key_dir = key_dir
        self._domains = domains

    def mint(self, pool: str, machine: PoolMachine, seconds: int) -> PoolToken:
        """An IDTOKEN with which exactly this machine can join the pool, and do nothing else.

        Raises:
            Unavailable: it cannot be made now.
            ValueError: there can be no such machine.
        """
        domain = self._domain(pool)
        identity = f"{user_of(machine)}@{domain}"
        arguments = ["-key", pool, "-identity", identity]
        arguments += ["-authz", AUTHORIZATION, "-lifetime", str(int(seconds))]
        settings = {
            # Not of this host's configuration: the key's place and the issuer are the pool's.
            "_CONDOR_SEC_PASSWORD_DIRECTORY": str(self._key_dir.absolute()),
            "_CONDOR_TRUST_DOMAIN": domain,
        }
        try:
            made = run(["condor_token_create", *arguments], timeout=_SECONDS, env=settings)
        except VMJobsError as error:
            raise self._unavailable(pool, error.message) from error
        token = made.text.strip()
        try:
            expires = expiry(token, identity)
        except ValueError as error:
            raise self._unavailable(pool, str(error)) from error
        return PoolToken(token=token, identity=identity, expires=expires)

    def _domain(self, pool: str) -> str:
        domain = self._domains.get(pool, "")
        if not _DOMAIN.fullmatch(domain):
            known = ", ".join(self._domains) or "none"
            raise Unavailable("pool", f"pool {pool!r} is not in the settings; known are: {known}")
        if not (self._key_dir / pool).is_file():
            raise self._unavailable(pool, f"there is no signing key {self._key_dir / pool}")
        return domain

    @staticmethod
    def _unavailable(pool: str, what: str) -> Unavailable:
        return Unavailable(
            "pool", f"pool {pool}: no token can be made for its machines: {what}", hint=_HINT
        )


def user_of(machine: PoolMachine) -> str:
    """Whom a machine's tokens are for: no other machine has any for the same.

    Raises:
        ValueError: there can be no such machine.
    """
    user = f"{names.MEMBER_USER}{machine.name}.{machine.id}.{machine.incarnation}"
    if not USER.fullmatch(user):
        raise ValueError(f"{user!r} is not what a cluster's machine is called")
    return user


_HINT: Final = "the setting pool_key_dir names a directory with a signing key for each pool (mode 0600)"


def expiry(token: str, identity: str) -> datetime:
    """When a token ends, as it says itself.

    Raises:
        ValueError: it is no token, or not one for this identity. The sentence has nothing of it.
    """
    try:
        _, claims, _ = token.split(".")
        said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        subject, expires = said["sub"], datetime.fromtimestamp(int(said["exp"]), UTC)
    except (ValueError, TypeError, KeyError, OverflowError, OSError, binascii.Error):
        raise ValueError("condor_token_create made no token that ends") from None
    if subject != identity:
        raise ValueError("condor_token_create made a token for somebody else")
    return expires
