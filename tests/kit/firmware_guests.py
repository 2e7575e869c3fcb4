"""Disks that firmware boots: each prints a line on the serial port and ends its VM.

They are built byte by byte, so that a test needs no boot loader, assembler or file system tools.
They use the board's ports: COM1, the power management block of the ICH9, its reset control.
"""

from __future__ import annotations

import struct
from pathlib import Path

from vmjobs.hypervisor.base import BootImage
from vmjobs.model import BootMethod, HypervisorKind

#: What a disk may do after it has printed, as 16 or 64 bit code, which are the same bytes here: the
#: ports and values fit into 16 bits, and ``66`` switches operand sizes back and forth.
_OUT_AX = b"\xef"
_HALT = b"\xf4\xeb\xfd"  # hlt; jmp to it


def bios_disk(path: Path, line: str, do: str) -> BootImage:
    """A disk with a master boot record. do: ``poweroff`` or ``reset``."""
    prologue = b"\xfc\x31\xc0\x8e\xd8"  # cld; xor ax, ax; mov ds, ax
    end = {
        "poweroff": b"\xba\x04\x06\xb8\x00\x20" + _OUT_AX,  # mov dx, 0604h; mov ax, 2000h; out dx, ax
        "reset": b"\xba\xf9\x0c\xb0\x06\xee",  # mov dx, 0cf9h; mov al, 6; out dx, al
    }[do] + _HALT
    say = b"\xba\xf8\x03\xac\x08\xc0\x74\x03\xee\xeb\xf8"  # mov dx, 03f8h; lodsb; until 0: out
    size = len(prologue) + 3 + len(say) + len(end)
    code = prologue + b"\xbe" + struct.pack("<H", 0x7C00 + size) + say + end
    sector = (code + line.encode() + b"\r\n\0").ljust(510, b"\0") + b"\x55\xaa"
    path.write_bytes(sector.ljust(1 << 20, b"\0"))
    return _image(path, BootMethod.BIOS)


def uefi_disk(path: Path, line: str, do: str) -> BootImage:
    """A disk with a FAT file system and ``/EFI/BOOT/BOOTX64.EFI``."""
    end = {
        "poweroff": b"\xba\x04\x06\x00\x00\xb8\x00\x20\x00\x00\x66" + _OUT_AX,
        "reset": b"\xba\xf9\x0c\x00\x00\xb0\x06\xee",
    }[do] + _HALT
    say = b"\xfc\xba\xf8\x03\x00\x00\xac\x08\xc0\x74\x03\xee\xeb\xf8"
    code = b"\x48\x8d\x35" + struct.pack("<i", len(say) + len(end)) + say + end  # lea rsi, [rip+…]
    path.write_bytes(_fat(_pe(code + line.encode() + b"\r\n\0")))
    return _image(path, BootMethod.UEFI)


def _image(path: Path, boot: BootMethod) -> BootImage:
    kinds = (HypervisorKind.KVM, HypervisorKind.QEMU)
    return BootImage(digest="", root=path, boot=boot, kinds=kinds)


def _pe(code: bytes) -> bytes:
    """An EFI application: a PE32+ file of one section."""
    align = 0x200
    body = code.ljust(-(-len(code) // align) * align, b"\0")
    dos = b"MZ".ljust(60, b"\0") + struct.pack("<I", 64)
    coff = struct.pack("<HHIIIHH", 0x8664, 1, 0, 0, 0, 112, 0x0022)
    optional = struct.pack("<HBBIIIII", 0x20B, 0, 0, len(body), 0, 0, align, align)
    optional += struct.pack("<QIIHHHHHHIIIIHH", 0, align, align, *(0,) * 7, align * 2, align, 0, 10, 0)
    optional += struct.pack("<QQQQII", 0, 0, 0, 0, 0, 0)
    section = struct.pack(
        "<8sIIIIIIHHI", b".text", len(body), align, len(body), align, *(0,) * 4, 0x60000020
    )
    headers = dos + b"PE\0\0" + coff + optional + section
    return headers.ljust(align, b"\0") + body


def _fat(program: bytes) -> bytes:
    """A FAT12 file system of 1 MiB, one sector to the cluster."""
    sectors, fat_sectors, root_entries = 2048, 6, 16
    boot = b"\xeb\x3c\x90MSDOS5.0" + struct.pack(
        "<HBHBHHBHHHII", 512, 1, 1, 1, root_entries, sectors, 0xF8, fat_sectors, 32, 2, 0, 0
    )
    boot += struct.pack("<BBBI11s8s", 0x80, 0, 0x29, 1, b"NO NAME    ", b"FAT12   ")
    count = -(-len(program) // 512)
    chain = [0xFF8, 0xFFF, 0xFFF, 0xFFF, *range(5, 4 + count), 0xFFF]
    root = _entry(b"EFI        ", 0x10, 2)
    efi = (
        _entry(b".          ", 0x10, 2)
        + _entry(b"..         ", 0x10, 0)
        + _entry(b"BOOT       ", 0x10, 3)
    )
    inner = _entry(b".          ", 0x10, 3) + _entry(b"..         ", 0x10, 2)
    inner += _entry(b"BOOTX64 EFI", 0x20, 4, len(program))
    parts = (
        boot.ljust(510, b"\0") + b"\x55\xaa",
        _packed(chain).ljust(fat_sectors * 512, b"\0"),
        root.ljust(root_entries * 32, b"\0"),
        efi.ljust(512, b"\0"),
        inner.ljust(512, b"\0"),
        program,
    )
    return b"".join(parts).ljust(sectors * 512, b"\0")


def _entry(name: bytes, attributes: int, cluster: int, size: int = 0) -> bytes:
    return struct.pack("<11sB14xHI", name, attributes, cluster, size)


def _packed(chain: list[int]) -> bytes:
    """FAT12: two entries in three bytes."""
    even = [*chain, 0][: len(chain) + len(chain) % 2]
    pairs = zip(even[::2], even[1::2], strict=True)
    return b"".join((a | b << 12).to_bytes(3, "little") for a, b in pairs)
