# SPDX-License-Identifier: Apache-2.0
"""The connection of one engine process to its guard: never waits, comes back by itself.

The owner's thread sends and receives without blocking. Everything slow (finding or starting the
guard, the handshake, mapping the pool) happens on a connecting thread that lives only while there is
no connection. A guard that is absent, slow or dead is a state of the link, never an exception.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcr.config import MismatchChoice
from kvcr.errors import GuardUnavailable, KvcrError, MustFail, ProtocolError, Refused
from kvcr.protocol.codec import MAX_MESSAGE_BYTES
from kvcr.protocol.engine import Hello, Rejected, ToEngine, ToGuard, Welcome, to_engine, to_guard

logger = logging.getLogger(__name__)

R = TypeVar("R")

HANDSHAKE_S = 5.0
WELCOME_S = 60.0
"""A guard that is alive may be making the pool: a second for 15 GiB, or for half a GiB of memory that a
virtual machine never touched."""
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
SLOW_S = 1.0
"""How long a guard whose socket was full is left alone."""
MAX_KEPT = 4096
"""Messages kept for it. Past this, to end the connection is the shorter way to say them all."""

# Plain numbers: to combine two of the module's flags takes as long as a short message.
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

_SLOW_ERRORS = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS})


@dataclass(frozen=True)
class Session(Generic[R]):
    """One connection after its handshake. ``number`` counts the connections of this link, from 1."""

    sock: socket.socket
    welcome: Welcome
    resources: R
    number: int
    arrived: select.poll
    """Asks whether there is input: a recv that finds none takes three times as long, for its exception."""


class GuardLink(Generic[R]):
    """A connection that is there or not.

    ``find_socket`` returns the path to connect to (and may start a guard). ``attach`` maps what the
    guard offers; it gets the resources of the session before, or None, and may return those. Both run
    on the connecting thread. ``on_change`` is called on that thread after each new session.
    """

    def __init__(
        self,
        *,
        find_socket: Callable[[], str],
        hello: Hello,
        attach: Callable[[Welcome, R | None], R],
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._find_socket = find_socket
        self._hello = hello
        self._attach = attach
        self._on_change = on_change
        self._session: Session[R] | None = None
        self._resources: R | None = None
        self._sessions = 0
        self._slow_until = 0.0
        self._kept: deque[ToGuard] = deque()
        self._closed = False
        self._cause = ""
        self._refused: Refused | None = None
        self._settled = threading.Event()
        self._stop = threading.Event()
        self._buffer = bytearray(MAX_MESSAGE_BYTES + 1)
        self._view = memoryview(self._buffer)
        self._connector: threading.Thread | None = None
        self._connect_in_background()

    # --- owner's thread -------------------------------------------------------------------------

    @property
    def session(self) -> Session[R] | None:
        """The live connection, or None. Any thread."""
        return self._session

    @property
    def resources(self) -> R | None:
        """What the last session mapped; outlives the session, because the pool outlives the guard."""
        return self._resources

    @property
    def usable(self) -> bool:
        """Connected, and not slow."""
        return self._session is not None and time.monotonic() >= self._slow_until

    @property
    def refused(self) -> Refused | None:
        """The guard's last "no", until it says yes."""
        return self._refused

    def require_start(self, on_mismatch: MismatchChoice) -> None:
        """Raise MustFail if the guard refused the layout, and guard or engine say that this is fatal.

        Every other refusal means to serve cold and to ask again: during an upgrade the engine before may be
        there for a while, or a guard of another version.
        """
        refused = self._refused
        if refused is not None and (
            refused.code == "fail" or (refused.code == "layout" and on_mismatch == "fail")
        ):
            raise MustFail(f"the guard refuses this engine, which must not start then: {refused.reason}")

    def wait(self, timeout_s: float) -> bool:
        """Wait until connected or refused; for start-up only. True when connected."""
        self._settled.wait(timeout_s)
        return self._session is not None

    def fileno(self) -> int:
        """Descriptor to poll for input, -1 while there is no connection."""
        session = self._session
        return -1 if session is None else session.sock.fileno()

    def send(self, message: ToGuard) -> bool:
        """Send without waiting. False: there is no guard, or it is slow; the message is dropped."""
        return self._send_kept() and self._send(message)

    def deliver(self, message: ToGuard) -> None:
        """Send, or keep for when a slow guard listens again: what it is never told of it would hold for ever.

        Lost with the connection only, whose end frees what was held for it.
        """
        if self._session is not None and not self.send(message) and self._session is not None:
            self._kept.append(message)
            if len(self._kept) > MAX_KEPT:
                self._lose(self._session, "too much waits for it")

    @property
    def keeps(self) -> bool:
        """Whether something waits for :meth:`receive` to send it."""
        return bool(self._kept)

    def _send_kept(self) -> bool:
        while self._kept:
            if not self._send(self._kept[0]):
                return False
            self._kept.popleft()
        return True

    def _send(self, message: ToGuard) -> bool:
        session = self._session
        if session is None or time.monotonic() < self._slow_until:
            return False
        try:
            session.sock.send(to_guard.encode(message), _SEND_FLAGS)
        except OSError as error:
            if error.errno in _SLOW_ERRORS:
                self._slow_until = time.monotonic() + SLOW_S
                self._log(
                    "guard %s does not empty its socket; cold for %.0f s", session.welcome.guard, SLOW_S
                )
            else:
                self._lose(session, error.strerror or "connection lost")
            return False
        return True

    def receive(self) -> list[ToEngine]:
        """Everything that has arrived; what is kept is sent. Never waits."""
        self._send_kept()
        messages: list[ToEngine] = []
        session = self._session
        while session is not None and session.arrived.poll(0):
            try:
                size = session.sock.recv_into(self._buffer, 0, _RECEIVE_FLAGS)
            except OSError as error:
                if error.errno not in _SLOW_ERRORS:
                    self._lose(session, error.strerror or "connection lost")
                break
            if size == 0:
                self._lose(session, "the guard closed the connection")
                break
            try:
                messages.append(to_engine.decode(self._view[:size]))
            except ProtocolError as error:
                self._lose(session, str(error))
                break
        return messages

    def close(self) -> None:
        """End the connection and the connecting thread. Idempotent."""
        self._closed = True
        self._stop.set()
        connector = self._connector
        if connector is not None and connector is not threading.current_thread():
            connector.join(HANDSHAKE_S)
        session, self._session = self._session, None
        if session is not None:
            session.sock.close()

    def _lose(self, session: Session[R], why: str) -> None:
        if self._session is not session:
            return
        self._session = None
        self._kept.clear()
        session.sock.close()
        if not self._closed:
            self._log("lost guard %s: %s; going on cold", session.welcome.guard, why)
            self._connect_in_background()

    # --- connecting thread ----------------------------------------------------------------------

    def _connect_in_background(self) -> None:
        self._settled.clear()
        self._connector = threading.Thread(target=self._connect_until_up, name="kvcr-connect", daemon=True)
        self._connector.start()

    def _connect_until_up(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closed:
            try:
                session = self._connect()
            except Refused as error:
                self._refused = error
                self._settled.set()
                self._log("guard refused this engine (%s); serving cold and asking again", error)
                backoff_s = MAX_BACKOFF_S
            except (KvcrError, OSError) as error:
                self._log("no guard: %s; serving cold and trying again", error)
            else:
                if self._closed:
                    session.sock.close()
                    return
                self._refused = None
                self._cause = ""
                self._slow_until = 0.0
                self._resources = session.resources
                self._session = session
                self._settled.set()
                logger.info(
                    "%s rank %d connected to guard %s (incarnation %d, epoch %d)",
                    self._hello.role,
                    self._hello.rank,
                    session.welcome.guard,
                    session.welcome.incarnation,
                    session.welcome.epoch,
                )
                if self._on_change is not None:
                    self._on_change()
                return
            # Jitter, so that the ranks of a big engine do not knock in step.
            self._stop.wait(backoff_s * random.uniform(0.75, 1.25))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _connect(self) -> Session[R]:
        path = self._find_socket()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(HANDSHAKE_S)
            try:
                sock.connect(path)
            except OSError as error:
                raise GuardUnavailable(f"nobody answers on {path}: {error.strerror or error}") from error
            self._say_hello(sock)
            welcome = self._answer(sock, path)
            resources = self._attach(welcome, self._resources)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._sessions += 1
        arrived = select.poll()
        arrived.register(sock, select.POLLIN)
        return Session(sock, welcome, resources, self._sessions, arrived)

    def _say_hello(self, sock: socket.socket) -> None:
        raw = to_guard.encode(self._hello)
        try:
            pidfd = os.pidfd_open(os.getpid())
        except OSError:
            # An old kernel, or a sandbox: the guard finds out about our end a little later.
            sock.send(raw)
            return
        try:
            socket.send_fds(sock, [raw], [pidfd])
        finally:
            os.close(pidfd)

    def _answer(self, sock: socket.socket, path: str) -> Welcome:
        ready, _, _ = select.select([sock], [], [], WELCOME_S)
        raw = sock.recv(MAX_MESSAGE_BYTES) if ready else b""
        if not raw:
            raise GuardUnavailable(f"the guard at {path} did not answer Hello within {WELCOME_S:.0f} s")
        answer = to_engine.decode(raw)
        if isinstance(answer, Rejected):
            raise Refused(answer.code, answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the guard at {path} answered Hello with {type(answer).__name__}")
        return answer

    def _log(self, text: str, *values: object) -> None:
        """Warn once per cause, not once per attempt."""
        cause = text % values
        if cause != self._cause:
            self._cause = cause
            logger.warning("pid %d: %s", os.getpid(), cause)
