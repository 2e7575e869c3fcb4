"""The smallest bootable payloads: a file system with one program, and a boot sector.

Each prints one line on the console and powers off. They are assembled here, instruction by
instruction, so that a probe needs neither a compiler nor busybox.
"""

from __future__ import annotations

import platform
import struct

_BASE = 0x400000
_ELF_HEADER = 64
_PROGRAM_HEADER = 56
_X86_64 = 62

_REBOOT_MAGIC_1 = 0xFEE1DEAD
_REBOOT_MAGIC_2 = 672274793
_REBOOT_POWER_OFF = 0x4321FEDC


def is_supported() -> bool:
    """Whether there is a program for this node's processors."""
    return platform.machine() in {"x86_64", "amd64"}


def initramfs(line: str) -> bytes:
    """An uncompressed cpio archive; its ``/init`` prints ``line`` and powers off."""
    return b"".join(
        [
            _entry("dev", 0o040755),
            _entry("dev/console", 0o020600, device=(5, 1)),
            _entry("init", 0o100755, _program(line.encode() + b"\n")),
            _entry("TRAILER!!!", 0),
        ]
    )


def boot_sector(line: str) -> bytes:
    """A one-sector disk for a PC with an ICH9, which prints ``line`` and powers off."""
    end = b"\xba\x04\x06\xb8\x00\x20\xef"  # mov dx, 0604h; mov ax, 2000h; out dx, ax
    end += b"\xf4\xeb\xfd"  # hlt; jmp to it
    # Wait until the port has sent the last byte, or SeaBIOS's own last ones would be overwritten:
    say = b"\xba\xfd\x03\xec\xa8\x20\x74\xfb"  # mov dx, 03fdh; in al, dx; test al, 20h; jz to in
    say += b"\xac\x08\xc0\x74\x05\xb2\xf8\xee\xeb\xee"  # lodsb; until 0: mov dl, f8h; out; jmp
    begin = b"\xfc\x31\xc0\x8e\xd8\xbe"  # cld; xor ax, ax; mov ds, ax; mov si, message
    message = 0x7C00 + len(begin) + 2 + len(say) + len(end)
    code = begin + struct.pack("<H", message) + say + end + line.encode() + b"\r\n\0"
    return code.ljust(510, b"\0") + b"\x55\xaa"


def _program(message: bytes) -> bytes:
    """A static ELF executable for x86-64."""

    def body(address: int) -> bytes:
        return b"".join(
            [
                b"\xb8" + struct.pack("<I", 1),  # mov eax, SYS_write
                b"\xbf" + struct.pack("<I", 1),  # mov edi, stdout
                b"\xbe" + struct.pack("<I", address),  # mov esi, message
                b"\xba" + struct.pack("<I", len(message)),  # mov edx, length
                b"\x0f\x05",  # syscall
                b"\xb8" + struct.pack("<I", 169),  # mov eax, SYS_reboot
                b"\xbf" + struct.pack("<I", _REBOOT_MAGIC_1),
                b"\xbe" + struct.pack("<I", _REBOOT_MAGIC_2),
                b"\xba" + struct.pack("<I", _REBOOT_POWER_OFF),
                b"\x0f\x05",
                b"\xeb\xfe",  # jmp to itself
            ]
        )

    start = _ELF_HEADER + _PROGRAM_HEADER
    code = body(_BASE + start + len(body(0)))
    size = start + len(code) + len(message)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    elf = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, 2, _X86_64, 1, _BASE + start, _ELF_HEADER, 0, 0),
        *(_ELF_HEADER, _PROGRAM_HEADER, 1, 0, 0, 0),
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return elf + segment + code + message


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """One entry of a cpio archive in the format ``newc``."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
