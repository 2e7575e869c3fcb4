"""HTCondor's own programs, as others run them."""

from __future__ import annotations

import os


def own_settings() -> dict[str, str]:
    """What of this process's environment HTCondor's tools go by."""
    return {k: v for k, v in os.environ.items() if k == "CONDOR_CONFIG" or k.startswith("_CONDOR_")}
