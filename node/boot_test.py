"""Boot test of ``vmjobs image build``: an image that fails it gets no name."""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from images.build.scratch_dir import CancelCheck, ScratchDir
from images.manifest import ImageManifest
from images.recipe import Recipe
from images.store.image_store import ImageStore
from node.parts import make_hypervisors, make_run_parts, run_locally
from vmjobs.agent.hypervisor_registry import HypervisorRegistry
from vmjobs.agent.vm.events import EventQueue, LeaseLost
from vmjobs.config import Config
from vmjobs.errors import BuildError
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.hypervisor.select import has_architecture
from vmjobs.local import LocalJob, describe_inputs
from vmjobs.model import HypervisorKind, JobSpec, JobState, StreamName

#: Limits of a probe job: MiB, MiB, seconds.
MEMORY, DISK, RUN_SECONDS = 1024, 512, 600
#: Seconds between two checks whether the image is still wanted.
CHECK_SECONDS = 1.0

#: Runs each of the recipe's probes; the shell runs those without a ``#!`` line.
_ALL_PROBES = """#!/bin/sh
for probe in probe-*; do
    chmod +x "$probe"
    "./$probe" || { echo "$probe ended with status $?" >&2; exit 1; }
done
"""
_NO_PROBE = "#!/bin/sh\nexit 0\n"


class BootTest:
    """Boots images of ``store`` on this node's hypervisors.

    The recipe's probes run on the first hypervisor only; on the others an empty job must complete.
    """

    def __init__(
        self,
        settings: Config,
        store: ImageStore,
        on_step: Callable[[str], None] = lambda _text: None,
        hypervisors: HypervisorRegistry | None = None,
    ) -> None:
        """hypervisors: of this node; their known probe results are used again."""
        self._settings = settings
        self._store = store
        self._on_step = on_step
        self._hypervisors = hypervisors or make_hypervisors(settings, store)

    def __call__(self, digest: str, recipe: Recipe, scratch: ScratchDir) -> None:
        """Boot the image.

        Raises:
            BuildError: it does not boot, is not ready in time, or a probe fails; with the reason.
                Also what ``scratch.check_cancelled`` raises, after the VM has ended.
        """
        kinds = self._kinds(digest)
        for number, kind in enumerate(kinds):
            scratch.check_cancelled()
            self._on_step(f"{recipe.name}: boot test on {kind}")
            probes = recipe.probes if number == 0 else ()
            self._run(digest, recipe.name, kind, probes, scratch)

    def _kinds(self, digest: str) -> list[HypervisorKind]:
        image, hypervisors = self._store.manifest(digest), self._hypervisors
        wanted = image.hypervisors
        kinds = _working_kinds(image, hypervisors.results) or _working_kinds(image, hypervisors.probe())
        if not kinds:
            raise BuildError(
                f"no hypervisor on this host boots the image, which is for {image.architecture}: "
                f"it needs one of {', '.join(wanted)}",
                hint="`vmjobs doctor` shows what is wrong; --no-boot-test builds without the test",
            )
        return kinds

    def _run(
        self,
        digest: str,
        name: str,
        kind: HypervisorKind,
        probes: Sequence[str],
        scratch: ScratchDir,
    ) -> None:
        # The journal creates the run's own directory; this one has the job's input files.
        folder = scratch.folder / f"probe-{kind}"
        folder.mkdir()
        texts = {f"probe-{number:02}": text for number, text in enumerate(probes)}
        files = {file: folder / file for file in texts}
        for file, text in texts.items():
            files[file].write_text(text)
        spec = JobSpec(
            image=digest,
            script=_ALL_PROBES if probes else _NO_PROBE,
            inputs=describe_inputs(files),
            memory=MEMORY,
            disk=DISK,
            hypervisor=kind,
            run_seconds=RUN_SECONDS,
        )
        output = io.BytesIO()
        job = LocalJob(
            job_id=f"probe-{uuid.uuid4().hex[:12]}",
            spec=spec,
            image_digest=digest,
            files=files,
            output_directory=folder / "outputs",
            on_report=lambda _report: None,
            sinks={StreamName.OUT: output, StreamName.ERR: output},
        )
        runs = self._settings.state_dir / "local" / "runs"
        run_parts = make_run_parts(self._settings, self._store, self._hypervisors, runs)
        run_parts.journal.recover(self._hypervisors.drivers)  # of earlier runs that were killed
        event_queue = EventQueue()
        with _stop_on_check_failure(scratch.check_cancelled, event_queue):
            outcome = run_locally(run_parts, job, event_queue)
        if outcome.state is not JobState.COMPLETED:
            text = output.getvalue().decode("utf-8", "replace").strip()[-2000:]
            message = f"the image {name} fails its boot test on {kind}: {outcome.reason.message}"
            raise BuildError(f"{message}; its output:\n{text}" if text else message)


@contextmanager
def _stop_on_check_failure(check_cancelled: CancelCheck, event_queue: EventQueue) -> Iterator[None]:
    """Stop the run when ``check_cancelled`` raises; raise that exception once the run has ended."""
    raised: list[Exception] = []
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(CHECK_SECONDS):
            try:
                check_cancelled()
            except Exception as error:
                raised.append(error)
                event_queue.put(LeaseLost())
                return

    poller = threading.Thread(target=poll, name="check", daemon=True)
    poller.start()
    try:
        yield
    finally:
        ended.set()
        poller.join()
    if raised:
        raise raised[0]


def _working_kinds(image: ImageManifest, results: Sequence[ProbeResult]) -> list[HypervisorKind]:
    working = {
        result.kind
        for result in results
        if result.works and has_architecture(result.abilities, image.architecture)
    }
    return [kind for kind in image.hypervisors if kind in working]
