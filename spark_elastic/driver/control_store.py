"""ControlStore: the rendezvous key-value store of a job, in the driver's memory, with one namespace per generation.

It is reached only over the job's authenticated connections; there is no open TCPStore. Values live as long as their
generation, those of generation 0 as long as the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from spark_elastic.protocol.connection import FRAME_LIMIT
from spark_elastic.protocol.messages import WHOLE_JOB, StoreReply, StoreRequest
from spark_elastic.protocol.packing import pack

# How many bytes a namespace may hold, waiting requests included. A rendezvous takes a few hundred bytes per rank.
SPACE_LIMIT = 256 * 2**20
WAITER_BYTES = 1024
# Bytes of the values in one answer: it has to fit into a frame.
ANSWER_LIMIT = FRAME_LIMIT - 2**20
INT64 = range(-(2**63), 2**63)
Answer = Callable[[StoreReply], None]


@dataclass(slots=True)
class _Waiter:
    """A ``get`` that waits for keys which were missing at the last check, or a ``gather`` that waits for other ranks."""

    request: StoreRequest
    answer: Answer
    missing: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        return WAITER_BYTES + sum(map(len, (*self.request.keys, *self.request.values)))


@dataclass(slots=True)
class _Space:
    """The values of a generation, and the requests that wait for each key, so that a ``set`` need not look at all of them."""

    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, list[_Waiter]] = field(default_factory=dict)
    gathering: dict[str, list[_Waiter]] = field(default_factory=dict)
    size: int = 0

    def grow(self, size: int) -> None:
        if self.size + size > SPACE_LIMIT:
            raise ValueError(f"the store is full, it takes {SPACE_LIMIT:,} bytes a generation")
        self.size += size

    def put(self, key: str, value: bytes) -> None:
        known = self.values.get(key)
        self.grow(len(value) - len(known) if known is not None else len(key) + len(value))
        self.values[key] = value

    def remove(self, key: str) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.size -= len(key) + len(value)
        return True


class ControlStore:
    """Only the driver's event loop uses it.

    A ``get`` of a missing key is answered once the key is set. A ``gather`` is answered once its key has as many values as its
    amount says, with all of them packed into one, in order of arrival.
    """

    def __init__(self) -> None:
        self._spaces: dict[int, _Space] = {WHOLE_JOB: _Space()}

    def open_generation(self, generation: int) -> None:
        """Begin a generation's namespace and end all earlier ones; requests that still wait there are refused."""
        for old in [number for number in self._spaces if number not in (WHOLE_JOB, generation)]:
            self.close_generation(old)
        self._spaces[generation] = _Space()

    def close_generation(self, generation: int) -> None:
        """Forget a generation's keys, and refuse the requests that wait for them."""
        space = self._spaces.pop(generation, _Space())
        for waiter in itertools.chain(*space.waiting.values(), *space.gathering.values()):
            waiter.answer(StoreReply(waiter.request.number, gone=True))

    def handle(self, request: StoreRequest, answer: Answer) -> None:
        """Execute a request. ``answer`` is called now, or for a ``get`` or ``gather`` once all values are there."""
        space = self._spaces.get(request.generation)
        if space is None:
            answer(StoreReply(request.number, gone=True))
            return
        waiter = _Waiter(request, answer)
        if request.operation == "get":
            _attempt(waiter, lambda: _get(waiter, space))
        elif request.operation == "gather":
            _attempt(waiter, lambda: _gather(waiter, space))
        else:
            _attempt(waiter, lambda: answer(_execute(request, space)))
            self._wake(request.keys, space)

    @staticmethod
    def _wake(keys: Iterable[str], space: _Space) -> None:
        for waiter in [w for key in keys if key in space.values for w in space.waiting.pop(key, ())]:
            space.size -= waiter.size
            _attempt(waiter, partial(_get, waiter, space))


def _attempt(waiter: _Waiter, act: Callable[[], None]) -> None:
    """Run ``act``. Answer a wrong request with the reason: the fault is its sender's, and disturbs nobody else."""
    try:
        act()
    except (ValueError, IndexError) as error:
        request = waiter.request
        keys = ", ".join(map(repr, request.keys))[:200]
        waiter.answer(StoreReply(request.number, error=f"{request.operation} of {keys}: {error}"))


def _check_answer(values: Iterable[bytes]) -> None:
    size = sum(map(len, values))
    if size > ANSWER_LIMIT:
        raise ValueError(f"the answer has {size:,} bytes, more than the {ANSWER_LIMIT:,} that fit into a frame")


def _get(waiter: _Waiter, space: _Space) -> None:
    """Answer if all keys exist, else wait for those that are missing."""
    keys, values = waiter.request.keys, space.values
    # All keys are checked again, because some may have been deleted in the meantime.
    waiter.missing = waiter.missing.difference(values) or set(keys).difference(values)
    if waiter.missing:
        space.grow(waiter.size)
        space.waiting.setdefault(next(iter(waiter.missing)), []).append(waiter)
    else:
        found = tuple(map(values.__getitem__, keys))
        _check_answer(found)
        waiter.answer(StoreReply(waiter.request.number, found))


def _gather(waiter: _Waiter, space: _Space) -> None:
    """Answer all requests once the last one has arrived. Each rank asks once, so there are as many requests as ranks."""
    request, name = waiter.request, waiter.request.keys[0]
    space.grow(waiter.size)
    gathered = space.gathering.setdefault(name, [])
    gathered.append(waiter)
    if len(gathered) >= request.amount:
        del space.gathering[name]
        space.size -= sum(each.size for each in gathered)
        brought = [value for each in gathered for value in each.request.values]
        for each in gathered:
            _attempt(each, lambda: _check_answer(brought))
        if sum(map(len, brought)) <= ANSWER_LIMIT:
            packed = pack(brought)
            for each in gathered:
                each.answer(StoreReply(each.request.number, (packed,)))


def _execute(request: StoreRequest, space: _Space) -> StoreReply:
    """Carry out a request that need not wait."""
    number, keys, values = request.number, request.keys, space.values
    match request.operation:
        case "check":
            return StoreReply(number, amount=int(all(key in values for key in keys)))
        case "set":
            for key, value in zip(keys, request.values, strict=True):
                space.put(key, value)
        case "set_default":
            # Every caller gets the value that was set first.
            for key, value in zip(keys, request.values, strict=True):
                if key not in values:
                    space.put(key, value)
            chosen = tuple(values[key] for key in keys)
            _check_answer(chosen)
            return StoreReply(number, chosen)
        case "add":
            total = int(values.get(keys[0], b"0")) + request.amount
            if total not in INT64:
                raise ValueError(f"{total} is more than 64 bits hold")
            space.put(keys[0], str(total).encode())
            return StoreReply(number, amount=total)
        case "delete":
            return StoreReply(number, amount=sum(map(space.remove, keys)))
    return StoreReply(number)
