"""The site's pool, as the service and the bearer of a token use it."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.grid import Grid
from vmjobs.cluster.pool import PoolVm


def mint(grid: Grid, vm: PoolVm, seconds: int = 600) -> dict[str, Any]:
    """Issue a token as the service does."""
    code = (
        "from vmjobs.config import load; from vmjobs.cluster.pool import PoolVm;"
        "from condor.pool.tokens import CondorTokenIssuer;"
        "c = load(); minter = CondorTokenIssuer(c.pool_key_dir, {'site': c.pool('site').trust_domain});"
        f"print(minter.mint('site', {vm}, {seconds}).model_dump_json())"
    )
    answer: dict[str, Any] = json.loads(grid.on("api", "python3", "-c", code, user="vmjobs"))
    return answer


def pool(grid: Grid, expression: str) -> Any:
    """Evaluate an expression on the service's pool object."""
    code = (
        "import json; from vmjobs.config import load; from condor.pool.condor_pool import CondorPool;"
        "from vmjobs.cluster.pool import PoolVm; pool = CondorPool('site', load().pool('site'));"
        f"print(json.dumps({expression}, default=vars))"
    )
    return json.loads(grid.on("worker", "python3", "-c", code, user="vmjobs"))


def withdraw(grid: Grid, *vms: PoolVm) -> None:
    pool(grid, f"pool.withdraw({list(vms)})")


def as_bearer(grid: Grid, token: str, *command: str) -> str:
    """Run an HTCondor command with only this token, on a host outside the site."""
    script = (
        "umask 077; d=$(mktemp -d); trap 'rm -rf $d' EXIT;"
        ' printf %s "$1" >$d/token; shift; export HOME=$d;'
        " export _CONDOR_SEC_TOKEN_DIRECTORY=$d _CONDOR_SEC_CLIENT_AUTHENTICATION_METHODS=IDTOKENS;"
        ' "$@" 2>&1 || true'
    )
    return grid.on("api", "sh", "-c", script, "-", token, *command, user="vmjobs")


def advertise(grid: Grid, token: str, **attributes: str) -> None:
    ad = {"MyType": "Machine", "MyAddress": "<192.0.2.1:9>", "State": "Unclaimed", **attributes}
    text = "".join(f'{name} = "{value}"\n' for name, value in ad.items())
    send = 'printf "%s" "$1" >$HOME/ad; condor_advertise -pool site.grid -tcp UPDATE_STARTD_AD $HOME/ad'
    as_bearer(grid, token, "sh", "-c", send, "-", text)
