"""Every ClassAd attribute and file name that vmjobs uses with HTCondor, in one place."""

from __future__ import annotations

from typing import Final

# --------------------------------------------------------------------------- job ads

JOB_ID: Final = "VMJobsId"
JOB_ARRAY: Final = "VMJobsArray"
JOB_INDEX: Final = "VMJobsIndex"
JOB_OWNER: Final = "VMJobsOwner"
JOB_NAME: Final = "VMJobsName"
JOB_LABELS: Final = "VMJobsLabels"
JOB_IMAGE: Final = "VMJobsImage"
JOB_HYPERVISOR: Final = "VMJobsHypervisor"

#: Written by the execute node while the job runs. The gridmanager mirrors each attribute whose
#: name begins with ``Chirp`` from the site's queue to the queue that the job was submitted to.
VM_STATE: Final = "ChirpVMState"
VM_NODE: Final = "ChirpVMNode"
VM_HYPERVISOR: Final = "ChirpVMHypervisor"
VM_STAGE_SECONDS: Final = "ChirpVMStageSeconds"
VM_BOOT_SECONDS: Final = "ChirpVMBootSeconds"
VM_EXIT_CHANNEL: Final = "ChirpVMExitChannel"
VM_REASON: Final = "ChirpVMReason"

CLUSTER_ID: Final = "ClusterId"
PROC_ID: Final = "ProcId"
JOB_STATUS: Final = "JobStatus"
HOLD_REASON: Final = "HoldReason"
REMOVE_REASON: Final = "RemoveReason"
GRID_JOB_ID: Final = "GridJobId"
EXIT_CODE: Final = "ExitCode"
EXIT_SIGNAL: Final = "ExitSignal"
EXIT_BY_SIGNAL: Final = "ExitBySignal"

# --------------------------------------------------------------------------- machine ads

HAS_VMJOBS: Final = "HasVMJobs"
VERSION: Final = "VMJobsVersion"
HYPERVISORS: Final = "VMJobsHypervisors"
IMAGE_DIGESTS: Final = "VMJobsImageDigests"
MEMORY: Final = "VMJobsMemory"
DISK: Final = "VMJobsDisk"
RUNNING: Final = "VMJobsRunning"

# --------------------------------------------------------------------------- files

#: In an array's spool directory.
EVENT_LOG: Final = "events.log"
SUBMIT_MARKER: Final = "submitting"
LOCK: Final = "lock"

#: In a job's directory below it. The token is what travels to the execute node.
TOKEN: Final = "job.token"  # noqa: S105  a file name
EXEC_OUT: Final = "exec.out"
EXEC_ERR: Final = "exec.err"

#: In the scratch directory of a running job.
CHIRP_CONFIG: Final = ".chirp.config"

#: First word of the note in each submit event; the job's id is the second.
EVENT_NOTE: Final = "vmjobs"
