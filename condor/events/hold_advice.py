"""Advice on held jobs, by the codes of their holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from condor.events.outcomes import AGAIN, OUTCOMES, outcome_of

#: HTCondor's ``HoldReasonCode`` for holds by a job's policy, including the policy of vmjobs.
POLICY: Final = 3
#: A hold that ends by itself: the job waits for its input files.
SPOOLING: Final = 16

#: By the failure's code (:mod:`condor.events.outcomes`). ``{id}`` stands for the job.
_BY_FAILURE_CODE: Final[Mapping[str, str]] = {
    "NOT_FOUND": "name an image that everybody may use (`vmjobs image list`): "
    "condor_qedit {id} VMJobImage '\"NAME\"' && condor_release {id}",
    "IMAGE_REJECTED": "use an image with a signature that the site trusts",
    "IMAGE_UNSUITABLE": "use an image with the guest program, setpriv, GNU find and tar, as "
    "`vmjobs image build` makes them",
    "INVALID_REQUEST": "correct the fault with condor_qedit, then condor_release {id}; "
    "a job without should_transfer_files = YES has to be submitted again",
    "TOO_LARGE": "condor_qedit {id} RequestDisk KIB && condor_release {id}",
    "OUTPUT_TOO_LARGE": "condor_qedit {id} RequestDisk KIB && condor_release {id}",
    "CONSOLE_FLOODED": "let the job write to its output, not to the VM's console",
    "KERNEL_PANIC": "try another hypervisor (VMJobHypervisor) or more memory (RequestMemory): "
    "condor_qedit, then condor_release {id}",
    "BOOT_TIMED_OUT": "condor_qedit {id} VMJobBootTimeout SECONDS && condor_release {id}; if it "
    "never boots, try the image with `vmjobs run`",
    "NO_EXIT_REPORT": "check whether the job powers off its VM, or kills the guest program",
    "TIMED_OUT": "divide the job",
    "NO_HYPERVISOR": "let the node choose (condor_qedit {id} VMJobHypervisor undefined), or use "
    "an image that its hypervisors boot (`vmjobs node list`)",
}
_RETRY_ADVICE: Final = (
    "`vmjobs doctor` on that node shows the fault; for another attempt: "
    "condor_qedit {id} VMJobMaxStarts {more} && condor_release {id}"
)
#: By HTCondor's own code.
_BY_HOLD_CODE: Final[Mapping[int, str]] = {
    1: "condor_release {id}",
    3: "its own policy (on_exit_hold, periodic_hold) held it; correct the cause, then "
    "condor_release {id}",
    6: "HTCondor could not start the job on its node: see the job's log and executable",
    12: "an output file was not transferred: see transfer_output_files, then condor_release {id}",
    13: "an input file was not transferred: see transfer_input_files, then condor_release {id}",
    15: "condor_release {id}",
    21: "the node held it: ask its operators",
    26: "a policy of the schedd's operators held it: ask them",
    34: "it used more than it asked for: ask for more, then condor_release {id}",
}
#: The last one is for codes that are not in the table.
_BY_SUBCODE: Final = {
    outcome.subcode: (code, outcome) for code, outcome in (*OUTCOMES.items(), ("", outcome_of("")))
}


def hold_reason(code: int, subcode: int) -> str:
    """The reason of a hold by vmjobs, in words; ``""`` for other holds."""
    found = _BY_SUBCODE.get(subcode) if code == POLICY else None
    return found[1].why if found else ""


def remedy(code: int, subcode: int, job: str, *, starts: int = 0, is_remote: bool = False) -> str:
    """What the user can do about a held job; ``""`` if there is no advice.

    job: its id. starts: how often it was started. is_remote: it was sent to a site, which has a copy.
    """
    found = _BY_SUBCODE.get(subcode) if code == POLICY else None
    if found is None:
        text = _BY_HOLD_CODE.get(code, "correct what the reason names, then condor_release {id}")
    elif is_remote:
        # Editing the job here does not change the site's copy.
        if found[1].action == AGAIN:
            return f"condor_release {job} for another attempt"
        return "correct the submit file, and submit the job again"
    else:
        text = _BY_FAILURE_CODE.get(found[0], _RETRY_ADVICE if found[1].action == AGAIN else "")
    return text.replace("{id}", job).replace("{more}", str(starts + 5))
