"""Jobs, nodes and hypervisors, as the service, its clients and the agents exchange them. No I/O.

The modules of this package and :mod:`vmjobs.states` define the models; others import them from here.
"""

from vmjobs.model.base import MIB, REPLY, FrozenModel, LenientModel, faults_of, now
from vmjobs.model.checkpoint import Checkpoint, SavedFile, VmSpec
from vmjobs.model.fields import ContentDigest, Digest, ImageName, ImageRef, Namespace, RelativePath, Tag
from vmjobs.model.hypervisors import (
    CAPABILITIES,
    CHECKPOINTABLE_KINDS,
    EMULATED_ARCHITECTURES,
    NODE_ARCHITECTURE,
    BootMethod,
    Capabilities,
    HypervisorKind,
    NetworkMode,
    check_checkpoint,
    check_cpus,
    check_image_cpus,
    kinds_with_cpus,
)
from vmjobs.model.job import (
    BYTE_COUNTERS,
    AttemptClaim,
    AttemptId,
    CondorRef,
    ExitChannel,
    ExitStatus,
    Job,
    JobAction,
    JobEvent,
    JobTicket,
    Output,
    Reason,
    RejectedEntry,
    Report,
    StreamName,
    advance,
    reason,
)
from vmjobs.model.node import HypervisorInfo, Node, NodeName
from vmjobs.model.published_port import PublishedPort
from vmjobs.model.spec import (
    CONSOLE_RULE,
    MAX_ARRAY,
    MAX_SCRIPT_BYTES,
    POWEROFF,
    REPORT,
    STARTED,
    VARIABLE_NAME,
    Environment,
    InputFile,
    JobSpec,
    Strategy,
    Submission,
    parse_spec,
)
from vmjobs.states import (
    MAX_ATTEMPTS,
    ON_NODE_STATES,
    REQUEUE_REASONS,
    RETRYABLE,
    TRANSITIONS,
    Actor,
    JobState,
    ReasonCode,
)
