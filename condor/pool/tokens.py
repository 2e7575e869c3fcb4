"""IDTOKENS for cluster VMs, made with a separate signing key.

Each pool has a key that signs nothing else: removing it from the pool's collector invalidates the
tokens of the pool's clusters, and no others.
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
from vmjobs.cluster.pool import PoolVm
from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import Unavailable, VMJobsError
from vmjobs.subprocess import run

#: The only authorization of such a token: to send machine ads, and to be reached through the collector.
AUTHORIZATION: Final = "ADVERTISE_STARTD"

_TIMEOUT_SECONDS: Final = 30.0
#: The user names in tokens.
USER_NAME: Final = re.compile(
    rf"{names.CLUSTER_VM_USER_PREFIX}[a-z][a-z0-9-]{{0,62}}\.[0-9a-f]{{32}}\.[1-9][0-9]{{0,9}}"
)
_DOMAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class CondorTokenIssuer:
    """Implements :class:`api.services.TokenIssuer`.

    key_dir: a signing key for each pool, in a file with the pool's name, which this process's user owns
    and no other user can read. domains: the trust domain of each pool.
    """

    def __init__(self, key_dir: Path, domains: Mapping[str, str]) -> None:
        self._key_dir = key_dir
        self._domains = domains

    def mint(self, pool: str, vm: PoolVm, seconds: int) -> PoolToken:
        domain = self._domain(pool)
        identity = f"{user_name_of(vm)}@{domain}"
        arguments = ["-key", pool, "-identity", identity]
        arguments += ["-authz", AUTHORIZATION, "-lifetime", str(int(seconds))]
        settings = {
            # Override this host's configuration: key directory and issuer are the pool's.
            "_CONDOR_SEC_PASSWORD_DIRECTORY": str(self._key_dir.absolute()),
            "_CONDOR_TRUST_DOMAIN": domain,
        }
        try:
            made = run(["condor_token_create", *arguments], timeout=_TIMEOUT_SECONDS, env=settings)
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
        return Unavailable("pool", f"pool {pool}: cannot make tokens for its VMs: {what}", hint=_HINT)


def user_name_of(vm: PoolVm) -> str:
    """The user name in a VM's tokens, which no other VM has.

    Raises:
        ValueError: the VM's name, id or incarnation is invalid.
    """
    user = f"{names.CLUSTER_VM_USER_PREFIX}{vm.name}.{vm.id}.{vm.incarnation}"
    if not USER_NAME.fullmatch(user):
        raise ValueError(f"{user!r} is not a valid user name of a cluster VM")
    return user


_HINT: Final = "the setting pool_key_dir names a directory with a signing key for each pool (mode 0600)"


def expiry(token: str, identity: str) -> datetime:
    """The time at which a token expires, from its claims.

    Raises:
        ValueError: it is no token, or is for another identity. The message contains no part of it.
    """
    try:
        _, claims, _ = token.split(".")
        said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        subject, expires = said["sub"], datetime.fromtimestamp(int(said["exp"]), UTC)
    except (ValueError, TypeError, KeyError, OverflowError, OSError, binascii.Error):
        raise ValueError("condor_token_create made no token with an expiry time") from None
    if subject != identity:
        raise ValueError("condor_token_create made a token for another identity")
    return expires
