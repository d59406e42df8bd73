"""Processes of one program that notice each other's death. Needs no JAX.

A collective waits for ever for a device whose host is gone, and the main thread with it. So every process holds a
connection to the first one and says at intervals that it lives; the first tells all others of the first that does not.
A process that learns of it says in one sentence which host is gone and ends at once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

_GRACE = 1.0
"""Seconds in which the cause of an error, another process's death, is waited for."""


_HELLO = 5.0
"""Seconds in which a new connection says who it is."""

_LONGEST = 1 << 20
"""Bytes of a message; what sends more is no process of ours."""


class HostError(RuntimeError):
    """Another process of the program is gone, or did not come."""


def _leave(sentence: str) -> NoReturn:
    """End this process from any thread: the main one may wait for a collective that never ends."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os.write(2, f"{sentence}\n".encode())
    os._exit(1)


def _listen_everywhere(port: int, backlog: int) -> socket.socket:
    """A socket for connections by IPv4 and, where the system has it, by IPv6: a coordinator may be named by either."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=backlog)


class _Line:
    """JSON lines over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, **message: Any) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None where the other side closed or speaks otherwise. Raises TimeoutError."""
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data or len(self._rest) > _LONGEST:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


class Watch:
    """Meets all processes at the first one's `address`, then watches over them until `close`.

    timeout: seconds to wait for all processes in the beginning, and afterwards for a sign of life; a process that was
    killed is noticed at once, since its system closes the connection. on_death: called with a sentence, from a thread;
    ends this process unless given.

    Raises HostError, naming who is missing, where not all processes come in time.
    """

    def __init__(
        self,
        address: tuple[str, int],
        processes: int,
        process: int,
        timeout: float,
        on_death: Callable[[str], Any] = _leave,
    ) -> None:
        self._processes, self._process, self._timeout = processes, process, timeout
        self._on_death = on_death
        self._closed = threading.Event()
        self._gone = threading.Event()
        self._lines: dict[int, _Line] = {}
        self._left: set[int] = set()
        self._leaving = threading.Condition()
        self._hosts: dict[int, str] = {process: socket.gethostname()}
        self._hook = sys.excepthook
        self.failed = False
        if process == 0:
            self._gather(address)
        else:
            self._join(address)
        sys.excepthook = self._failed
        atexit.register(self.close)
        for number, line in self._lines.items():
            threading.Thread(target=self._listen, args=(number, line), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _gather(self, address: tuple[str, int]) -> None:
        end = time.monotonic() + self._timeout
        host, port = address
        try:
            server = _listen_everywhere(port, self._processes)
        except OSError as error:
            raise HostError(
                f"Process 0 cannot listen on port {port} ({error.strerror}); end what uses it, or set "
                f"MOE28T_COORDINATOR={host}:PORT to another port."
            ) from None
        with server:
            while len(self._lines) < self._processes - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise HostError(self._missing()) from None
                line = _Line(connection)
                hello = self._hello(line, end)
                if hello is None:
                    connection.close()
                    continue
                number = hello["process"]
                fits = 0 < number < self._processes and number not in self._lines
                if hello["processes"] != self._processes or not fits:
                    line.send(refused=f"process 0 expects {self._processes} processes with different numbers")
                    raise HostError(
                        f"A process on {hello['host']} says that it is number {number} of {hello['processes']}, and "
                        f"this program has {self._processes} with different numbers; start each once."
                    )
                self._lines[number], self._hosts[number] = line, hello["host"]
        for line in self._lines.values():
            line.send(hosts=self._hosts)

    def _hello(self, line: _Line, end: float) -> dict[str, Any] | None:
        """What a new connection says of itself; None for a stranger, which anything may be that finds the port."""
        try:
            hello = line.receive(max(0.01, min(_HELLO, end - time.monotonic())))
        except TimeoutError:
            return None
        kinds = {"moe28t": int, "process": int, "processes": int, "host": str}
        if hello is None or any(type(hello.get(key)) is not kind for key, kind in kinds.items()):
            return None
        return hello

    def _missing(self) -> str:
        absent = [number for number in range(self._processes) if number not in self._hosts]
        here = ", ".join(f"{number} ({host})" for number, host in sorted(self._hosts.items()))
        return (
            f"Process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))} of {self._processes} did not come within "
            f"{self._timeout:g} s; here are {here}. Start the same command on every host."
        )

    def _join(self, address: tuple[str, int]) -> None:
        end = time.monotonic() + self._timeout
        connection = None
        while connection is None:
            try:
                connection = socket.create_connection(address, max(0.01, end - time.monotonic()))
            except OSError as error:
                if time.monotonic() + 0.2 >= end:
                    raise HostError(
                        f"Process {self._process} cannot reach process 0 at {address[0]}:{address[1]} within "
                        f"{self._timeout:g} s ({error.strerror or error}); start the same command on every host, "
                        "and let that port through."
                    ) from None
                time.sleep(0.2)
        line = _Line(connection)
        line.send(moe28t=1, process=self._process, processes=self._processes, host=self._hosts[self._process])
        try:
            # Process 0 waits as long for the others, and may have begun later.
            answer = line.receive(2 * self._timeout)
        except TimeoutError:
            answer = None
        if answer is None or "hosts" not in answer:
            reason = answer["refused"] if answer else "it ended, or other processes did not come"
            raise HostError(
                f"Process 0 at {address[0]}:{address[1]} gave up: {reason}. Start all processes again."
            )
        self._hosts = {int(number): host for number, host in answer["hosts"].items()}
        self._lines[0] = line

    def _beat(self) -> None:
        while not self._closed.wait(self._timeout / 5):
            for line in list(self._lines.values()):
                with contextlib.suppress(OSError):
                    line.send(alive=True)

    def _listen(self, number: int, line: _Line) -> None:
        name = f"Process {number} ({self._hosts.get(number, 'unknown host')})"
        while not self._closed.is_set():
            try:
                message = line.receive(self._timeout)
            except TimeoutError:
                if number not in self._left:
                    self._died(
                        f"{name} has given no sign of life for {self._timeout:g} s; this process ends too."
                    )
                return
            if message is None:
                if number not in self._left:
                    self._died(f"{name} is gone: it was killed or its host failed; this process ends too.")
                return
            if "bye" in message:
                with self._leaving:
                    self._left.add(number)
                    self._leaving.notify_all()
            if "failed" in message:
                self._died(f"{name} ended with an error: {message['failed']} This process ends too.")
                return
            if "dead" in message:
                self._died(message["dead"])
                return

    def _died(self, sentence: str) -> None:
        if self._closed.is_set() or self._gone.is_set():
            return
        self._gone.set()
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(dead=sentence)
        self._on_death(sentence)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that ends this process is no ordinary end."""
        self.fail(f"{kind.__name__}: {error}".rstrip(".") + ".")
        self._hook(kind, error, trace)

    def _say(self, **message: Any) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(**message)

    def fail(self, sentence: str) -> None:
        """Tell the others that this process ends because of an error, which may itself be that another is gone."""
        if self._gone.wait(_GRACE):
            time.sleep(_GRACE)
        self._say(failed=sentence)
        self.failed = True
        self._closed.set()

    def leave(self) -> str:
        """Wait until all processes end, at most `timeout` seconds. Empty where they do; otherwise a sentence, which the
        others are told: one of them may wait for this process in a collective."""
        if self._closed.is_set():
            return ""
        if self._process != 0:
            self._say(bye=True)
        with self._leaving:
            together = self._leaving.wait_for(lambda: self._lines.keys() <= self._left, self._timeout)
        if together:
            # The first process knows when all have come, and lets them go.
            if self._process == 0:
                self._say(bye=True)
            self._closed.set()
            return ""
        late = min(self._lines.keys() - self._left)
        sentence = (
            f"it ended, and process {late} ({self._hosts.get(late, 'unknown host')}) did not within "
            f"{self._timeout:g} s; set MOE28T_TIMEOUT to more seconds where processes end that far apart."
        )
        self.fail(sentence)
        return sentence

    def close(self) -> None:
        """Take leave: the others go on without watching this process."""
        if not self._closed.is_set():
            self._closed.set()
            self._say(bye=True)
