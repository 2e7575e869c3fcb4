"""Every ClassAd attribute and file name that vmjobs uses with HTCondor, in one place."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
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
VM_RUN_SECONDS: Final = "ChirpVMRunSeconds"
VM_COLLECT_SECONDS: Final = "ChirpVMCollectSeconds"
#: What the machine has used and moved so far: see ``vmjobs.model.AMOUNTS``. HTCondor's own numbers
#: are those of the process in the machine's place; MemoryUsage is made of ours (node.conf).
VM_CPU_SECONDS: Final = "ChirpVMCpuSeconds"
VM_IMAGE_BYTES: Final = "ChirpVMImageBytes"
VM_INPUT_BYTES: Final = "ChirpVMInputBytes"
VM_MEMORY_BYTES: Final = "ChirpVMMemoryBytes"
VM_DISK_BYTES: Final = "ChirpVMDiskBytes"
VM_CONSOLE_BYTES: Final = "ChirpVMConsoleBytes"
VM_LOG_BYTES: Final = "ChirpVMLogBytes"
VM_OUTPUT_BYTES: Final = "ChirpVMOutputBytes"
VM_CHECKPOINT_BYTES: Final = "ChirpVMCheckpointBytes"
VM_EXIT_CHANNEL: Final = "ChirpVMExitChannel"
VM_REASON: Final = "ChirpVMReason"
#: Of an unchanged job: what is to become of it, and the HoldReasonSubCode of one that is held.
VM_OUTCOME: Final = "ChirpVMOutcome"
VM_SUBCODE: Final = "ChirpVMSubCode"
#: When it was tried last, in seconds of the epoch by its node's clock: when that began, or failed.
VM_TRIED: Final = "ChirpVMTried"
#: How often it was told to leave, and did: so many of its starts count for nothing.
VM_VACATED: Final = "ChirpVMVacated"
#: What it left and did not come back, and why.
VM_REJECTED: Final = "ChirpVMRejected"
#: What its image demands of nodes, once one has found out; and what the image was called then.
VM_IMAGE_KINDS: Final = "ChirpVMImageKinds"
VM_IMAGE_ARCH: Final = "ChirpVMImageArch"
VM_IMAGE_NAMED: Final = "ChirpVMImageNamed"
#: Whether that holds yet.
IMAGE_KNOWN: Final = "VMJobImageKnown"

#: What users write into the submit files of unchanged jobs.
WANTED_IMAGE: Final = "VMJobImage"
WANTED_HYPERVISOR: Final = "VMJobHypervisor"
WANTED_NETWORK: Final = "VMJobNetwork"
WANTED_BOOT_TIMEOUT: Final = "VMJobBootTimeout"
WANTED_CHECKPOINT: Final = "VMJobCheckpoint"
#: What the schedd's drop-in adds to such jobs (condor/config/schedd.conf).
POLICY: Final = "VMJobPolicy"
#: Instead of that on a schedd whose job router has it leave (condor/config/submit-router.conf).
ROUTED: Final = "route"
#: The version of the policy; nodes take no job with another one (condor/config/node.conf).
POLICY_NOW: Final = 2
#: Whether a job that failed for no reason of its own has to wait yet.
WAITS: Final = "VMJobWaits"
#: Which machines a job goes to first, be it such a one or the service's own.
JOB_RANK: Final = "VMJobRank"
#: What a job router writes into a job's ad: who looks after it, and the copy that leaves.
MANAGED: Final = "Managed"
ROUTED_TO: Final = "RoutedToJobId"
MAX_STARTS: Final = "VMJobMaxStarts"
OWN_REQUIREMENTS: Final = "VMJobOwnRequirements"

CLUSTER_ID: Final = "ClusterId"
PROC_ID: Final = "ProcId"
#: ``SCHEDD#CLUSTER.PROC#TIME``.
GLOBAL_ID: Final = "GlobalJobId"
#: Of a claimed slot: ``USER@DOMAIN`` of its job.
REMOTE_USER: Final = "RemoteUser"
JOB_STATUS: Final = "JobStatus"
OWNER: Final = "Owner"
HOLD_REASON: Final = "HoldReason"
HOLD_CODE: Final = "HoldReasonCode"
HOLD_SUBCODE: Final = "HoldReasonSubCode"
REMOVE_REASON: Final = "RemoveReason"
GRID_RESOURCE: Final = "GridResource"
GRID_JOB_ID: Final = "GridJobId"
EXIT_CODE: Final = "ExitCode"
EXIT_SIGNAL: Final = "ExitSignal"
EXIT_BY_SIGNAL: Final = "ExitBySignal"
WANT_IO_PROXY: Final = "WantIOProxy"

# --------------------------------------------------------------------------- machine ads

HAS_VMJOBS: Final = "HasVMJobs"
#: Why a node takes no jobs for a while.
FAULT: Final = "VMJobsFault"
VERSION: Final = "VMJobsVersion"
HYPERVISORS: Final = "VMJobsHypervisors"
UML_CPUS: Final = "VMJobsUmlCpus"
UML_CLOUD_INIT: Final = "VMJobsUmlCloudInit"
NETWORKS: Final = "VMJobsNetworks"
IMAGE_DIGESTS: Final = "VMJobsImageDigests"
IMAGE_NAMES: Final = "VMJobsImageNames"
MEMORY: Final = "VMJobsMemory"
MEMORY_FREE: Final = "VMJobsMemoryFree"
DISK: Final = "VMJobsDisk"
RUNNING: Final = "VMJobsRunning"

# ------------------------------------------------- machine ads of members of virtual clusters

MEMBER: Final = "VMJobsMember"
INCARNATION: Final = "VMJobsIncarnation"
CLUSTER: Final = "VMJobsCluster"
ADMITTED: Final = "VMJobsAdmitted"
#: Which machine it is, as nothing else ever was: names and incarnations come again with a new cluster.
MACHINE: Final = "VMJobsMachine"
#: What users select a cluster by; an operator's attribute of this name wins.
VIRTUAL_CLUSTER: Final = "VirtualCluster"
#: Of the ad that says whose tokens are over: `SECONDS-SINCE-1970:USER,…`, and the ad's name.
REVOKED: Final = "VMJobsRevoked"
REVOKED_NAME: Final = "revoked.offline.vc"
#: Ends every host name of a member's, so that none can be taken for a real host.
MEMBER_DOMAIN: Final = "vc"

#: Of an ad that stands for machines that could be started: what it was made of, how many of the cluster
#: are up, and its host's name.
OFFER: Final = "VMJobsOffer"
UP: Final = "VMJobsUp"
OFFER_DOMAIN: Final = "offline.vc"

#: HTCondor's own: divisions of a divided slot, jobs begun, the operating system in words.
DYNAMIC_SLOTS: Final = "NumDynamicSlots"
JOB_STARTS: Final = "JobStarts"
SYSTEM: Final = "OpSysLongName"

#: In a probe job's ad: which machine it is for.
PROBE: Final = "VMJobsProbe"
#: What a probe job runs, and the only thing that a machine runs before it is admitted.
PROBE_PROGRAM: Final = "/usr/local/libexec/vmjobs-probe"

#: User name of a machine's token is this, the member's name, a dot, and the machine.
MEMBER_USER: Final = "vmjobs-"

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
JOB_AD: Final = ".job.ad"
MACHINE_AD: Final = ".machine.ad"

#: In the guest's directory, beside `script`; the numbers make ours the last word of a configuration.
STARTD_CONFIG: Final = "97-vmjobs-startd.conf"
MEMBER_CONFIG: Final = "98-vmjobs-member.conf"

#: First word of the note in each submit event; the job's id is the second.
EVENT_NOTE: Final = "vmjobs"
