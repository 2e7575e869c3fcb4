"""Where machines of unchanged jobs are saved: at the service, for jobs that the startd vouches for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vmjobs.agent.starter import Starter
from vmjobs.cli.support import read_token
from vmjobs.client import CondorJobClient, ImageClient, Retries
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import SAVING, NetworkMode

#: One call's own patience is short: runs try again themselves, and look at their lease in between.
RETRIES: Final = Retries(deadline=20.0, ceiling=5.0)


@dataclass(frozen=True)
class ServiceCheckpointStores:
    """A :class:`vmjobs.agent.condor_checkpoint.CheckpointStores`."""

    settings: Config

    def open(self, slot: Starter) -> CondorJobClient:
        """See :class:`vmjobs.agent.condor_checkpoint.CheckpointStores`."""
        from condor.slot import job_of  # noqa: PLC0415 - jobs that are saved are few

        job = job_of(slot)
        return CondorJobClient(
            self.settings.api_url, self._token(), job.key, job.owner, retries=RETRIES
        )

    def unfit(self, image: str, network: NetworkMode) -> str:
        """See :class:`vmjobs.agent.condor_checkpoint.CheckpointStores`."""
        from images.manifest import ImageManifest  # noqa: PLC0415

        client = ImageClient(self.settings.api_url, self._token(), retries=RETRIES)
        try:
            manifest = ImageManifest.parse(client.manifest(image), image)
        finally:
            client.close()
        if not set(manifest.hypervisors) & set(SAVING):
            able = " and ".join(manifest.hypervisors)
            return f"machines of {' and '.join(SAVING)} alone can be saved, and {able} boots the image"
        if network is not NetworkMode.NONE and not manifest.renews:
            return (
                "the image's guest cannot be saved: it does not take another token (guest contract 3)"
            )
        return ""

    def _token(self) -> str:
        path = self.settings.agent_token_file
        if path is None:
            raise Unavailable("agent", "this node has no token of its own for the service")
        return read_token(path)
