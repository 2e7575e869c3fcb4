"""Whether KVM can work on this node, as far as its device and processors tell."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/kvm")
#: Flags of x86 processors with hardware virtualization: Intel's VMX, AMD's SVM (Linux cpufeatures.h).
_FLAGS: Final = {"vmx", "svm"}


def unavailable_reason(device: Path = DEVICE, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return why no KVM VM can run on this node; ``""``: no known reason.

    A device without hardware virtualization belongs to a module that boots only kernels made for it.
    """
    try:
        with device.open("r+b", buffering=0):
            pass
    except OSError as error:
        return f"{device} cannot be opened: {error.strerror}"
    for line in cpuinfo.read_text("ascii", "replace").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags" and not _FLAGS & set(flags.split()):
            return f"{device} opens, but the processors have no hardware virtualization (vmx or svm)"
    return ""
