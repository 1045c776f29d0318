"""ControlStore: the rendezvous key-value store of a job, in the driver's memory, one name space a generation.

Reached only over the job's authenticated connections; there is no open TCPStore. Values live as long as their
generation, those of generation 0 as long as the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from spark_elastic.messages import StoreReply, StoreRequest

JOB = 0
Answer = Callable[[StoreReply], None]


@dataclass(slots=True)
class _Waiter:
    """A ``get`` that waits for the keys that were missing when it was last looked at, or a ``gather`` that waits for others."""

    request: StoreRequest
    answer: Answer
    missing: set[str] = field(default_factory=set)


class ControlStore:
    """Used by the driver's event loop alone.

    A ``get`` of a missing key is answered once the key is set; a ``gather``, with all values that were brought to its key in
    order of arrival, once there are as many as its amount.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, bytes]] = {JOB: {}}
        # Who waits, by the key that is waited for: with many workers each ``set`` must not look at every waiting one.
        self._waiting: dict[int, dict[str, list[_Waiter]]] = {JOB: {}}
        self._gathering: dict[int, dict[str, list[_Waiter]]] = {JOB: {}}

    def open_generation(self, generation: int) -> None:
        """Begin a generation's name space and end all earlier ones; who still waits in those is told."""
        for old in [number for number in self._values if number not in (JOB, generation)]:
            self.close_generation(old)
        self._values[generation] = {}
        self._waiting[generation] = {}
        self._gathering[generation] = {}

    def close_generation(self, generation: int) -> None:
        self._values.pop(generation, None)
        for waiting in (self._waiting.pop(generation, {}), self._gathering.pop(generation, {})):
            for waiter in itertools.chain.from_iterable(waiting.values()):
                waiter.answer(StoreReply(waiter.request.number, gone=True))

    def handle(self, request: StoreRequest, answer: Answer) -> None:
        """Execute a request; ``answer`` is called now, or for a ``get`` when all its keys exist."""
        values = self._values.get(request.generation)
        if values is None:
            answer(StoreReply(request.number, gone=True))
            return
        if request.operation == "get":
            self._get(_Waiter(request, answer))
            return
        if request.operation == "gather":
            self._gather(_Waiter(request, answer))
            return
        try:
            reply = _execute(request, values)
        except (ValueError, IndexError) as error:
            reply = StoreReply(request.number, error=f"{request.operation} of {request.keys}: {error}")
        answer(reply)
        waiting = self._waiting[request.generation]
        for waiter in [waiter for key in request.keys if key in values for waiter in waiting.pop(key, ())]:
            self._get(waiter)

    def _get(self, waiter: _Waiter) -> None:
        """Answer if all keys exist, else wait for any that does not."""
        keys, values = waiter.request.keys, self._values[waiter.request.generation]
        # The second look is at all keys: some may have been deleted meanwhile.
        waiter.missing = waiter.missing.difference(values) or set(keys).difference(values)
        if waiter.missing:
            self._waiting[waiter.request.generation].setdefault(next(iter(waiter.missing)), []).append(waiter)
        else:
            waiter.answer(StoreReply(waiter.request.number, tuple(map(values.__getitem__, keys))))

    def _gather(self, waiter: _Waiter) -> None:
        """Answer all when the last one has come. Of ranks that know of each other by this, everybody asks once."""
        request, gathering = waiter.request, self._gathering[waiter.request.generation]
        name = "/".join(request.keys)
        gathered = gathering.setdefault(name, [])
        gathered.append(waiter)
        if len(gathered) >= request.amount:
            del gathering[name]
            values = tuple(value for each in gathered for value in each.request.values)
            for each in gathered:
                each.answer(StoreReply(each.request.number, values))


def _execute(request: StoreRequest, values: dict[str, bytes]) -> StoreReply:
    """Carry out a request that need not wait."""
    number, keys = request.number, request.keys
    match request.operation:
        case "check":
            return StoreReply(number, amount=int(all(key in values for key in keys)))
        case "set":
            values.update(dict(zip(keys, request.values, strict=True)))
        case "set_default":
            # The first value counts; everybody gets it.
            pairs = list(zip(keys, request.values, strict=True))
            return StoreReply(number, tuple(values.setdefault(key, value) for key, value in pairs))
        case "add":
            total = int(values.get(keys[0], b"0")) + request.amount
            values[keys[0]] = str(total).encode()
            return StoreReply(number, amount=total)
        case "delete":
            return StoreReply(number, amount=sum(values.pop(key, None) is not None for key in keys))
    return StoreReply(number)
