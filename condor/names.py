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
#: Resources that the VM has used, and bytes it has moved (``vmjobs.model.BYTE_COUNTERS``). HTCondor's
#: own numbers are those of the process beside the VM; MemoryUsage is computed from these (node.conf).
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
#: Of a transparent job: its outcome for the schedd's policy, and the HoldReasonSubCode if it is held.
VM_OUTCOME: Final = "ChirpVMOutcome"
VM_SUBCODE: Final = "ChirpVMSubCode"
#: When its last attempt began or failed, in seconds since the epoch by its node's clock.
VM_TRIED: Final = "ChirpVMTried"
#: Number of evictions, which do not count as attempts.
VM_VACATED: Final = "ChirpVMVacated"
#: Outputs that were not transferred, and why.
VM_REJECTED: Final = "ChirpVMRejected"
#: Requirements of its image, once a node has determined them, and the image's name at that time.
VM_IMAGE_KINDS: Final = "ChirpVMImageKinds"
VM_IMAGE_ARCH: Final = "ChirpVMImageArch"
VM_IMAGE_NAMED: Final = "ChirpVMImageNamed"
#: Whether these requirements are still valid.
IMAGE_KNOWN: Final = "VMJobImageKnown"

#: Attributes that users set in the submit files of transparent jobs.
WANTED_IMAGE: Final = "VMJobImage"
WANTED_HYPERVISOR: Final = "VMJobHypervisor"
WANTED_NETWORK: Final = "VMJobNetwork"
WANTED_BOOT_TIMEOUT: Final = "VMJobBootTimeout"
WANTED_CHECKPOINT: Final = "VMJobCheckpoint"
#: Set by the schedd's drop-in on such jobs (condor/config/schedd.conf): the version of its policy.
POLICY: Final = "VMJobPolicy"
#: Its value on a schedd whose job router sends such jobs away (condor/config/submit-router.conf).
ROUTED: Final = "route"
#: The version of the policy that nodes require (condor/config/node.conf).
POLICY_VERSION: Final = 2
#: Whether a job has to wait before its next attempt, after one that failed for no fault of the job.
WAITS: Final = "VMJobWaits"
#: Rank of nodes for a transparent job or a job of the service.
JOB_RANK: Final = "VMJobRank"
#: Set by a job router: which program manages the job, and the id of the copy that leaves.
MANAGED: Final = "Managed"
ROUTED_TO: Final = "RoutedToJobId"
MAX_STARTS: Final = "VMJobMaxStarts"
OWN_REQUIREMENTS: Final = "VMJobOwnRequirements"

CLUSTER_ID: Final = "ClusterId"
PROC_ID: Final = "ProcId"
#: ``SCHEDD#CLUSTER.PROC#TIME``.
GLOBAL_ID: Final = "GlobalJobId"
#: In a claimed slot's ad: ``USER@DOMAIN`` of its job.
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
#: Why a node accepts no jobs for a while.
FAULT: Final = "VMJobsFault"
VERSION: Final = "VMJobsVersion"
HYPERVISORS: Final = "VMJobsHypervisors"
UML_CPUS: Final = "VMJobsUmlCpus"
UML_CLOUD_INIT: Final = "VMJobsUmlCloudInit"
ARCHITECTURES: Final = "VMJobsArchitectures"
NETWORKS: Final = "VMJobsNetworks"
IMAGE_DIGESTS: Final = "VMJobsImageDigests"
IMAGE_NAMES: Final = "VMJobsImageNames"
MEMORY: Final = "VMJobsMemory"
MEMORY_FREE: Final = "VMJobsMemoryFree"
DISK: Final = "VMJobsDisk"
RUNNING: Final = "VMJobsRunning"

# ------------------------------------------------- machine ads of cluster VMs

MEMBER: Final = "VMJobsMember"
INCARNATION: Final = "VMJobsIncarnation"
CLUSTER: Final = "VMJobsCluster"
ADMITTED: Final = "VMJobsAdmitted"
#: The VM's id, never used again: names and incarnations are reused by a later cluster.
MACHINE: Final = "VMJobsMachine"
#: Users select a cluster by this; an operator's attribute of this name takes precedence.
VIRTUAL_CLUSTER: Final = "VirtualCluster"
#: In the ad of revoked tokens: `SECONDS-SINCE-1970:USER,…`; and the ad's name.
REVOKED: Final = "VMJobsRevoked"
REVOKED_NAME: Final = "revoked.offline.vc"
#: Domain of all cluster VMs' host names, so that none equals the name of a real host.
CLUSTER_VM_DOMAIN: Final = "vc"

#: In an offline ad, which stands for VMs that could be started: a digest of its contents, and how many
#: VMs of the cluster are up; and the domain of its host name.
OFFER: Final = "VMJobsOffer"
UP: Final = "VMJobsUp"
OFFER_DOMAIN: Final = "offline.vc"

#: HTCondor's own: number of dynamic slots, jobs started, the operating system in words.
DYNAMIC_SLOTS: Final = "NumDynamicSlots"
JOB_STARTS: Final = "JobStarts"
SYSTEM: Final = "OpSysLongName"

#: In a probe job's ad: the id of the VM that it tests.
PROBE: Final = "VMJobsProbe"
#: The probe job's program, the only one that a VM runs before it is admitted.
PROBE_PROGRAM: Final = "/usr/local/libexec/vmjobs-probe"

#: The user name in a cluster VM's token is this, the VM's name, a dot, and its id.
CLUSTER_VM_USER_PREFIX: Final = "vmjobs-"

# --------------------------------------------------------------------------- files

#: In an array's spool directory.
EVENT_LOG: Final = "events.log"
SUBMIT_MARKER: Final = "submitting"
LOCK: Final = "lock"

#: In a job's directory below it. HTCondor transfers the token to the execute node.
TOKEN: Final = "job.token"  # noqa: S105  a file name
EXEC_OUT: Final = "exec.out"
EXEC_ERR: Final = "exec.err"

#: In the scratch directory of a running job.
CHIRP_CONFIG: Final = ".chirp.config"
JOB_AD: Final = ".job.ad"
MACHINE_AD: Final = ".machine.ad"

#: In the guest's directory, beside `script`; the numbers make HTCondor read these files last.
STARTD_CONFIG: Final = "97-vmjobs-startd.conf"
CLUSTER_VM_CONFIG: Final = "98-vmjobs-member.conf"

#: First word of the note in each submit event; the job's id is the second.
EVENT_NOTE: Final = "vmjobs"
