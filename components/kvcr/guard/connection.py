# SPDX-License-Identifier: Apache-2.0
"""Unix seqpacket sockets on the authority thread: nothing here ever waits."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvcr.errors import ConfigError, PoolBusy, ProtocolError
from kvcr.guard.loop import Loop
from kvcr.guard.rarely import Rarely

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 4096
MAX_QUEUED_BYTES = 16 << 20
"""A reader that is this far behind is cut off; it reconnects and starts from what the pool says."""

MAX_CONNECTIONS = 512
"""Of engine processes, guards of this host and strangers who may open the socket."""

FIRST_MESSAGE_S = 10.0
"""A connection that has not said by then what it is, is closed."""

_PAUSE_S = 0.2

# Plain numbers: to combine two of the module's flags takes as long as a short message.
_FLAGS = int(socket.MSG_DONTWAIT)
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_BYTES = 512 * 1024
_MESSAGES_PER_ROUND = 64
_MAX_UNIX_PATH = 107


class Connection:
    """One peer of the Unix socket: an engine process or another guard."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[Connection, memoryview], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        """``on_message`` gets a view that is valid during the call only; a ProtocolError from it closes the
        connection. ``on_close`` is called once, however the connection ends."""
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._on_message = on_message
        self._on_close = on_close
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._passed_fd = -1
        self._fresh = True
        self.closed = False
        loop.register(self._fd, select.EPOLLIN, self._ready)

    @property
    def sock(self) -> socket.socket:
        """For questions about the other end only."""
        return self._sock

    def take_passed_fd(self) -> int:
        """The descriptor that came with the first message, now the caller's; -1 if none did."""
        fd, self._passed_fd = self._passed_fd, -1
        return fd

    def send(self, raw: bytes) -> None:
        """Send, or queue until the reader reads. A reader too far behind is cut off."""
        if self.closed:
            return
        if self._queue:
            self._enqueue(raw)
            return
        try:
            self._sock.send(raw, _SEND_FLAGS)
        except (BlockingIOError, InterruptedError):
            self._enqueue(raw)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.unregister(self._fd)
        self._sock.close()
        if self._passed_fd >= 0:
            os.close(self.take_passed_fd())
        self._queue.clear()
        self._on_close(self)

    def close_after_sending(self) -> None:
        """Close; what is still queued has a second to leave."""
        if not self._queue:
            self.close()
        else:
            self._loop.later(1.0, self.close)

    def _enqueue(self, raw: bytes) -> None:
        self._queued_bytes += len(raw)
        if len(self._queue) >= MAX_QUEUED_MESSAGES or self._queued_bytes > MAX_QUEUED_BYTES:
            _rarely.warning("connection cut: it left %d messages unread", len(self._queue))
            self.close()
            return
        if not self._queue:
            self._loop.modify(self._fd, select.EPOLLIN | select.EPOLLOUT)
        self._queue.append(raw)

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if not self.closed and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._receive()

    def _flush(self) -> None:
        while self._queue:
            try:
                self._sock.send(self._queue[0], _SEND_FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error)
                return
            self._queued_bytes -= len(self._queue.popleft())
        self._loop.modify(self._fd, select.EPOLLIN)

    def _receive(self) -> None:
        # Bounded, so that one talkative process does not keep the others waiting; epoll comes back to it.
        for _ in range(_MESSAGES_PER_ROUND):
            try:
                count = self._receive_first() if self._fresh else self._sock.recv_into(_buffer, 0, _FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                # Said once, when the other end closed before it had read all we sent. What it sent before is
                # still there, and then an end of file.
                continue
            except OSError as error:
                self._fail(error)
                return
            if count == 0:
                self.close()
                return
            try:
                self._on_message(self, memoryview(_buffer)[:count])
            except ProtocolError as error:
                _rarely.warning("connection closed: %s", error)
                self.close()
            if self.closed:
                return

    def _receive_first(self) -> int:
        """The only message that may carry a descriptor; the kernel closes those of later ones."""
        count, ancillary, _, _ = self._sock.recvmsg_into(
            [_buffer], socket.CMSG_SPACE(4), _FLAGS | socket.MSG_CMSG_CLOEXEC
        )
        self._fresh = False
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4]):
                    if self._passed_fd >= 0:
                        os.close(self._passed_fd)
                    self._passed_fd = fd
        return count

    def _fail(self, error: OSError) -> None:
        if error.errno in (errno.EPIPE, errno.ECONNRESET):
            # Nobody reads any more. What was sent to us is still read, and the end of file behind it closes.
            self._queue.clear()
            self._queued_bytes = 0
            self._loop.modify(self._fd, select.EPOLLIN)
            return
        log.warning("connection lost: %s", error)
        self.close()


_rarely = Rarely(log)

# One buffer for all connections: only the authority thread receives, and messages are decoded at once.
_buffer = bytearray(_RECEIVE_BYTES)


class Listener:
    """Accepts connections, as many as are good for the guard. Belongs to the authority thread."""

    def __init__(
        self,
        loop: Loop,
        path: str,
        on_connection: Callable[[socket.socket], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """``on_refused(code)`` counts those that were closed at once. Raises as :func:`listen_unix`."""
        self._loop = loop
        self._path = path
        self._sock = listen_unix(path)
        self._on_connection = on_connection
        self._on_refused = on_refused
        self._count = 0
        loop.register(self._sock.fileno(), select.EPOLLIN, lambda _: self._accept())

    def gone(self) -> None:
        """A connection that was accepted is closed."""
        self._count -= 1

    def close(self) -> None:
        """Stop listening, and remove the socket."""
        self._loop.unregister(self._sock.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No descriptors left: the kernel would tell of those who wait for ever.
                _rarely.warning("accept on %s: %s", self._path, error)
                self._loop.modify(self._sock.fileno(), 0)
                self._loop.later(_PAUSE_S, self._resume)
                return
            if self._count >= MAX_CONNECTIONS:
                _rarely.warning("connection refused: there are %d", self._count)
                self._on_refused("too_many")
                sock.close()
                continue
            self._count += 1
            self._on_connection(sock)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.modify(self._sock.fileno(), select.EPOLLIN)


def listen_unix(path: str) -> socket.socket:
    """A listening seqpacket socket at ``path``, mode 0660. A stale file is replaced only if nobody answers.

    Raises PoolBusy when somebody does, ConfigError when the path cannot be used.
    """
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ConfigError(
            f"socket path {path!r} has {len(os.fsencode(path))} bytes, Unix sockets allow {_MAX_UNIX_PATH}; "
            "set a shorter --socket"
        )
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            _remove_stale(path)
        else:
            raise ConfigError(f"{path!r} exists and is not a socket; set another --socket or remove it")
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.bind(path)
        os.chmod(path, 0o660)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(f"socket {path!r} cannot be bound: {error.strerror}") from error
    return sock


def connect_unix(path: str) -> socket.socket:
    """Connect without waiting. Raises OSError when nobody listens, or the backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    try:
        connect_unix(path).close()
    except BlockingIOError as error:
        raise PoolBusy(f"somebody listens on {path!r} but does not accept; end it first") from error
    except OSError:
        os.unlink(path)
        return
    raise PoolBusy(f"another guard answers on {path!r}; end it first, or set another --socket")
