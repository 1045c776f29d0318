"""The sockets of one generation's Gloo group: found exactly, watched for breakage, and shut at once.

Gloo has no working abort: after the death of a peer only its neighbours in the ring get an error, and all other ranks hang
until the group's timeout. Shutting the sockets under Gloo ends every pending collective within milliseconds, also when the peer
is stopped rather than dead. Only the receiving side is shut: Gloo's loop then reads the end of the connection and fails all
operations on it, whereas an operation that fails to *write* (the other side shut, or closed) is sometimes never woken.

User code opens sockets, too, so those of the group are recognized by address: each rank publishes the address that its Gloo
device listens on, and a connection belongs to the group if its own or its peer's address is among the published ones.

Gloo keeps listening after its ranks are connected, and never closes the descriptors of those who connect. At the limit of
descriptors it ends the process. So the kernel is told to drop callers except while connections are being made (``Gate``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import psutil

from spark_elastic.protocol.connection import Connection

logger = logging.getLogger("spark_elastic")

Address = tuple[str, int]

# Fields of the kernel's struct tcp_info: tcpi_retransmits, tcpi_probes, tcpi_bytes_acked, tcpi_bytes_received.
_TCP_INFO = struct.Struct("=2xBB116xQQ")
# A connection counts as silent after this many retransmissions without an answer, which take a second or two in a local
# network.
SILENT_TRIES = 3

_BROKEN = select.POLLHUP | select.POLLERR | select.POLLRDHUP | select.POLLNVAL
# From Linux's asm-generic/socket.h; the module socket does not have them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
# A program of one instruction for the kernel's packet filter: accept no byte of any packet, which drops it.
_BPF_RET = 0x06
_DROP_ALL = struct.pack("HBBI", _BPF_RET, 0, 0, 0)


class GroupSockets:
    """The connections among the ranks of one group, as seen by this process.

    Methods may be called from any thread. ``capture`` keeps duplicates of the descriptors, so that ``is_broken`` costs a
    single system call. Forked children close these duplicates and Gloo's descriptors: otherwise a killed worker's peers would not
    see its end.
    """

    def __init__(self) -> None:
        self.addresses: set[Address] = set()
        self._kept: list[socket.socket] = []
        self._inodes: set[int] = set()
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._shut = False
        _all.add(self)

    def capture(self) -> None:
        """Take note of the connections that exist now: the group has just been built."""
        with self._lock:
            self._keep_new()
            for duplicate in self._kept:
                self._poll.register(duplicate.fileno(), select.POLLRDHUP)
            if self._shut:
                self._shut_kept()

    def is_broken(self) -> bool:
        """Whether a connection of the group has ended, at either side."""
        if self._shut:
            return True
        try:
            return any(events & _BROKEN for _, events in self._poll.poll(0))
        except RuntimeError:
            return self._shut  # another thread is checking at this moment

    def traffic(self) -> tuple[int, int]:
        """Return how many bytes have arrived, here and at the other ends, and how many connections are silent.

        A silent connection has sent something again and again, and its other end does not answer.
        """
        moved = silent = 0
        with self._lock:
            for duplicate in self._kept:
                try:
                    info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                except OSError:
                    continue
                if len(info) == _TCP_INFO.size:
                    resent, probed, acknowledged, received = _TCP_INFO.unpack(info)
                    moved += acknowledged + received
                    silent += max(resent, probed) >= SILENT_TRIES
        return moved, silent

    def shut(self) -> bool:
        """Make Gloo read the end of every connection of the group, so that its pending collectives fail at once on this rank.

        The peers do not notice, because our duplicates keep the connections open until ``close``: a peer that saw a connection
        end before the driver reported the world as broken would blame user code. Connections that were made after ``capture``
        (``new_group`` in user code) are found, too. May be repeated. Returns whether all connections were found.
        """
        with self._lock:
            is_first, self._shut = not self._shut, True
            self._shut_kept()
            try:
                self._keep_new()
            except OSError as error:  # no descriptor is left to look for further connections
                if is_first:
                    logger.warning("connections of groups that user code has made may stay open: %s", error)
                return False
            self._shut_kept()
            return True

    def close(self) -> None:
        """End the connections for good, after the group has been dropped."""
        with self._lock:
            self._shut = True
            self._poll = select.poll()
            self.addresses.clear()  # so that nothing is found any more
            for duplicate in self._kept:
                duplicate.close()
            self._kept.clear()

    def close_in_child(self) -> None:
        """In a forked child, close the duplicates, and Gloo's own descriptors, which are recognized by inode."""
        kept = {duplicate.fileno() for duplicate in self._kept}
        for descriptor in _descriptors():
            try:
                status = os.fstat(descriptor)
                if descriptor in kept or (stat.S_ISSOCK(status.st_mode) and status.st_ino in self._inodes):
                    os.close(descriptor)
            except OSError:
                pass
        for duplicate in self._kept:
            duplicate.detach()
        self._kept = []

    def _shut_kept(self) -> None:
        for duplicate in self._kept:
            _shutdown(duplicate)

    def _keep_new(self) -> None:
        for duplicate in self._find():
            inode = os.fstat(duplicate.fileno()).st_ino
            if inode in self._inodes:
                duplicate.close()
            else:
                self._inodes.add(inode)
                self._kept.append(duplicate)

    def _find(self) -> Iterator[socket.socket]:
        """Yield duplicates of the group's connections; the caller closes them."""
        for duplicate in _sockets():
            if _is_listening(duplicate) or not (_ends(duplicate) & self.addresses):
                duplicate.close()
            else:
                yield duplicate


class Gate:
    """The listening sockets of a group's Gloo device. While the gate is shut, the kernel drops what arrives there.

    So no one can connect any more. Existing connections have sockets of their own and are not affected. The gate is open while
    user code makes a group on the same device (``new_group``). Where the kernel does not allow filters, a warning is logged and
    the gate stays open.
    """

    def __init__(self, inodes: Collection[int]) -> None:
        self._inodes = frozenset(inodes)
        self._guests = 0
        self._lock = threading.Lock()

    def shut(self) -> None:
        """Refuse connections, unless some thread is inside ``opened`` right now."""
        with self._lock:
            if not self._guests:
                self._each(_refuse_connections)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let peers connect. This rank has to publish its address inside this context, which makes peers connect."""
        with self._lock:
            self._guests += 1
            self._each(_accept_connections)
        try:
            yield
        finally:
            with self._lock:
                self._guests -= 1
                if not self._guests:
                    self._each(_refuse_connections)

    def _each(self, change: Callable[[socket.socket], None]) -> None:
        for duplicate in _sockets():
            with duplicate:
                if os.fstat(duplicate.fileno()).st_ino in self._inodes:
                    change(duplicate)


def _refuse_connections(listener: socket.socket) -> None:
    global _has_warned
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    except OSError as error:
        if not _has_warned:
            _has_warned = True
            logger.warning(
                "the kernel does not let this process refuse connections to Gloo's port (SO_ATTACH_FILTER: %s). Training goes "
                "on, but whoever reaches that port can use up the descriptors of this process, which ends it: have the "
                "network keep others out, as docs/security.md says",
                error,
            )


def _accept_connections(listener: socket.socket) -> None:
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, struct.pack("i", 0))
    except OSError:
        pass  # the socket has no filter


_has_warned = False


def is_published(address: Address, content: bytes) -> bool:
    """Whether the bytes that a Gloo device publishes contain this address in C's layout: port, then host."""
    host, port = address
    number = port.to_bytes(2, "big")
    if ":" not in host:
        return number + socket.inet_aton(host) in content
    flow = b"\0" * 4  # the flow label, which lies between port and host in IPv6
    return number + flow + socket.inet_pton(socket.AF_INET6, host.partition("%")[0]) in content


def listening_addresses() -> dict[int, Address]:
    """The listening sockets of this process, by inode."""
    found = {}
    for duplicate in _sockets():
        with duplicate:
            if _is_listening(duplicate):
                host, port = duplicate.getsockname()[:2]
                found[os.fstat(duplicate.fileno()).st_ino] = (host, port)
    return found


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every internet stream socket of this process. No other file can take over a duplicate's number."""
    for descriptor in _descriptors():
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()


def _is_listening(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ends(connection: socket.socket) -> set[Address]:
    ends = set()
    for ask in (connection.getsockname, connection.getpeername):
        try:
            host, port = ask()[:2]
        except OSError:
            continue
        ends.add((host, port))
    return ends


def _shutdown(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the connection has ended already


_all: weakref.WeakSet[GroupSockets] = weakref.WeakSet()
_private: weakref.WeakSet[Connection] = weakref.WeakSet()


def keep_from_children(connection: Connection) -> None:
    """Make forked children close this connection's descriptor, so that its peer sees the end of this process at once."""
    _private.add(connection)


def _close_in_child() -> None:
    for sockets in list(_all):
        sockets.close_in_child()
    for connection in _private:
        if connection.descriptor >= 0:
            os.close(connection.descriptor)
    _private.clear()


os.register_at_fork(after_in_child=_close_in_child)
