"""Opens checkpoint stores of the service for transparent jobs that the startd confirms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from condor.node.slot import job_of_starter
from images.manifest import ImageManifest
from vmjobs.agent.condor_job.starter import StarterProcess
from vmjobs.cli.common import read_token
from vmjobs.client import CondorJobClient, ImageClient, Retries
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import CHECKPOINTABLE_KINDS, NetworkMode

#: A single call gives up soon: runs retry themselves and check their lease in between.
RETRIES: Final = Retries(deadline=20.0, ceiling=5.0)


@dataclass(frozen=True)
class ServiceCheckpointStores:
    """A :class:`vmjobs.agent.condor_job.checkpoints.CheckpointStores`."""

    settings: Config

    def open(self, slot: StarterProcess) -> CondorJobClient:
        job = job_of_starter(slot)
        return CondorJobClient(
            self.settings.api_url, self._token(), job.key, job.owner, retries=RETRIES
        )

    def save_obstacle(self, image: str, network: NetworkMode) -> str:
        client = ImageClient(self.settings.api_url, self._token(), retries=RETRIES)
        try:
            manifest = ImageManifest.parse(client.manifest(image), image)
        finally:
            client.close()
        if not set(manifest.hypervisors) & set(CHECKPOINTABLE_KINDS):
            able, boots_on = (" and ".join(k) for k in (CHECKPOINTABLE_KINDS, manifest.hypervisors))
            return f"only {able} can checkpoint a VM, but the image boots on {boots_on}"
        if network is not NetworkMode.NONE and not manifest.renews:
            return (
                "the image's guest cannot be checkpointed: it does not renew tokens (guest contract 3)"
            )
        return ""

    def _token(self) -> str:
        path = self.settings.agent_token_file
        if path is None:
            raise Unavailable("agent", "this node has no token of its own for the service")
        return read_token(path)
