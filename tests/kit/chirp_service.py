"""HTCondor's Chirp service, as a starter offers it, for tests without a starter."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import IO

import classad2

COOKIE = "c00kie-of-the-job"
#: ``JobStatus`` of a waiting job and of a running one.
IDLE, RUNNING = 1, 2
#: Bytes of a value that a starter accepts for a delayed update (io_proxy_handler.cpp).
DELAYED_MAX = 993


@dataclass
class ChirpService:
    """Answers Chirp commands for one job.

    attributes: of the job's ad. folder: files of the submit host. notes: entries of the job's log.
    events: names of attributes set without delay, in order; each is an event in the job's log.
    served: number of requests received.
    """

    folder: Path
    attributes: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    port: int = 0
    served: int = 0

    @property
    def config(self) -> bytes:
        """The contents of a job's ``.chirp.config``, as a starter writes it."""
        return f"127.0.0.1 {self.port} {COOKIE}\n".encode()

    def shown(self, status: int = RUNNING) -> tuple[str, str]:
        """State and reason as ``condor_q -af`` shows them. status: HTCondor's status of the job."""
        ad = classad2.ClassAd({"JobStatus": status})
        for name, value in self.attributes.items():
            ad[name] = classad2.ExprTree(value)
        return str(ad.eval("ChirpVMState")), str(ad.eval("ChirpVMReason"))

    def serve(self, connection: socket.socket) -> None:
        files: dict[int, IO[bytes]] = {}
        with connection, connection.makefile("rwb") as stream, suppress(ConnectionError):
            known = False
            while line := stream.readline():
                self.served += 1
                words = [
                    re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL)
                    for word in re.findall(r"(?:[^\\\s]|\\.)+", line.decode())
                ]
                if words[0] == "cookie":
                    known = words[1] == COOKIE
                answer = self._answer(words, stream, files) if known else b"-1\n"
                stream.write(answer)
                stream.flush()

    def _answer(self, words: list[str], stream: BufferedIOBase, files: dict[int, IO[bytes]]) -> bytes:
        if words[0] in ("read", "write", "close"):
            return self._of_open_file(files[int(words[1])], words, stream)
        if words[0] == "open":
            name, flags = words[1:3]
            try:
                files[7] = (self.folder / name).open("rb" if "r" in flags else "wb")
            except FileNotFoundError:
                return b"-3\n"
            return b"7\n41 1482952 33188 1 6400 6400 0 12 4096 8 1795230748 1795230748 1795230748\n"
        return self._of_the_job(words)

    def _of_open_file(self, file: IO[bytes], words: list[str], stream: BufferedIOBase) -> bytes:
        if words[0] == "read":
            data = file.read(int(words[2]))
            return b"%d\n%s" % (len(data), data)
        if words[0] == "write":
            return b"%d\n" % file.write(stream.read(int(words[2])))
        file.close()
        return b"0\n"

    def _of_the_job(self, words: list[str]) -> bytes:
        match words:
            case ["set_job_attr" | "set_job_attr_delayed" as command, name, value]:
                if command == "set_job_attr":
                    self.events.append(name)
                elif len(value.encode()) > DELAYED_MAX:
                    return b"-1\n"
                self.attributes[name] = value
            case ["get_job_attr" | "get_job_attr_delayed", name]:
                value = self.attributes.get(name, "")
                return f"{len(value)}\n{value}".encode() if value else b"-3\n"
            case ["ulog", text]:
                self.notes.append(text)
            case ["unlink", name]:
                (self.folder / name).unlink()
            case ["cookie", _]:
                pass
            case _:
                return b"-8\n"
        return b"0\n"


@contextmanager
def chirp_service(folder: Path) -> Iterator[ChirpService]:
    service = ChirpService(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service.port = listener.getsockname()[1]

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=service.serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield service
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
