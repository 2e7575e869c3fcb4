"""What to do about a job that is held, by the codes of its hold."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from condor.outcomes import AGAIN, OUTCOMES, outcome_of

#: HTCondor's own ``HoldReasonCode`` of what a job's policy does, ours included.
POLICY: Final = 3
#: A job of ours waits for its input files in this hold, and leaves it by itself.
SPOOLING: Final = 16

#: By the code of what went wrong (:mod:`condor.outcomes`). ``{id}`` stands for the job.
_OURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NOT_FOUND": "name an image that everybody may use (`vmjobs image list`): "
        "condor_qedit {id} VMJobImage '\"NAME\"' && condor_release {id}",
        "IMAGE_REJECTED": "take an image that is signed by somebody whom the site trusts",
        "IMAGE_UNSUITABLE": "take an image with the guest program, setpriv, GNU find and tar, as "
        "`vmjobs image build` makes them",
        "INVALID_REQUEST": "mend what the reason names with condor_qedit, then condor_release {id}; "
        "a job without should_transfer_files = YES has to be submitted again",
        "TOO_LARGE": "condor_qedit {id} RequestDisk KIB && condor_release {id}",
        "OUTPUT_TOO_LARGE": "condor_qedit {id} RequestDisk KIB && condor_release {id}",
        "CONSOLE_FLOODED": "have the job write to its output, and not to its machine's console",
        "KERNEL_PANIC": "try another hypervisor (VMJobHypervisor) or more memory (RequestMemory): "
        "condor_qedit, then condor_release {id}",
        "BOOT_TIMED_OUT": "condor_qedit {id} VMJobBootTimeout SECONDS && condor_release {id}; if it "
        "never boots, try the image with `vmjobs run`",
        "NO_EXIT_REPORT": "see whether the job powers its machine off, or kills what runs in it",
        "TIMED_OUT": "divide the job",
        "NO_HYPERVISOR": "let the node choose (condor_qedit {id} VMJobHypervisor undefined), or take "
        "an image that its hypervisors boot (`vmjobs node list`)",
    }
)
_AGAIN: Final = (
    "`vmjobs doctor` on that node says what is wrong there; for another try: "
    "condor_qedit {id} VMJobMaxStarts {more} && condor_release {id}"
)
#: By HTCondor's own code.
_HTCONDOR: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "condor_release {id}",
        3: "its own policy (on_exit_hold, periodic_hold) held it; mend what that is about, then "
        "condor_release {id}",
        6: "HTCondor could not start the job on its node: see the job's log and executable",
        12: "a file could not be brought back: see transfer_output_files, then condor_release {id}",
        13: "a file could not be taken along: see transfer_input_files, then condor_release {id}",
        15: "condor_release {id}",
        21: "the node held it: its operators know why",
        26: "a policy of the schedd's operators held it: ask them",
        34: "it used more than it asked for: ask for more, then condor_release {id}",
    }
)
#: The last is for codes that the table does not have.
_BY_SUBCODE: Final = {
    outcome.subcode: (code, outcome) for code, outcome in (*OUTCOMES.items(), ("", outcome_of("")))
}


def meaning(code: int, subcode: int) -> str:
    """What a hold of ours is about, in words; ``""`` for holds of others."""
    found = _BY_SUBCODE.get(subcode) if code == POLICY else None
    return found[1].why if found else ""


def remedy(code: int, subcode: int, job: str, *, starts: int = 0, remote: bool = False) -> str:
    """What whoever submitted a job does about its hold; ``""`` where there is nothing to say.

    job: its id. starts: how often it was begun. remote: it was sent to a site, which has a copy.
    """
    found = _BY_SUBCODE.get(subcode) if code == POLICY else None
    if found is None:
        text = _HTCONDOR.get(code, "mend what the reason names, then condor_release {id}")
    elif remote:
        # What is edited here does not change the site's copy.
        return (
            "mend the submit file, and submit the job again"
            if found[1].deed != AGAIN
            else (f"condor_release {job} for another try")
        )
    else:
        text = _OURS.get(found[0], _AGAIN if found[1].deed == AGAIN else "")
    return text.replace("{id}", job).replace("{more}", str(starts + 5))
