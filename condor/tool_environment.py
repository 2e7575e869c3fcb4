"""Environment for HTCondor's tools."""

from __future__ import annotations

import os


def condor_environment() -> dict[str, str]:
    """The variables of this process's environment that configure HTCondor's tools."""
    return {k: v for k, v in os.environ.items() if k == "CONDOR_CONFIG" or k.startswith("_CONDOR_")}
