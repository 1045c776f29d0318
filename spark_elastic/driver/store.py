"""ControlStore: the rendezvous key-value store of a job, in the driver's memory, one name space a generation.

Reached only over the job's authenticated connections; there is no open TCPStore. Values live as long as their
generation, those of generation 0 as long as the job.
"""

from __future__ import annotations

from collections.abc import Callable

from spark_elastic.messages import StoreReply, StoreRequest

JOB = 0
Answer = Callable[[StoreReply], None]


class ControlStore:
    """Used by the driver's event loop alone. A ``get`` of a missing key is answered once the key is set."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, bytes]] = {JOB: {}}
        self._waiting: dict[int, list[tuple[StoreRequest, Answer]]] = {JOB: []}

    def open_generation(self, generation: int) -> None:
        """Begin a generation's name space and end all earlier ones; who still waits in those is told."""
        for old in [number for number in self._values if number not in (JOB, generation)]:
            self.close_generation(old)
        self._values[generation] = {}
        self._waiting[generation] = []

    def close_generation(self, generation: int) -> None:
        self._values.pop(generation, None)
        for request, answer in self._waiting.pop(generation, []):
            answer(StoreReply(request.number, gone=True))

    def handle(self, request: StoreRequest, answer: Answer) -> None:
        """Execute a request; ``answer`` is called now, or for a ``get`` when all its keys exist."""
        values = self._values.get(request.generation)
        if values is None:
            answer(StoreReply(request.number, gone=True))
            return
        if request.operation == "get" and not all(key in values for key in request.keys):
            self._waiting[request.generation].append((request, answer))
            return
        try:
            reply = _execute(request, values)
        except (ValueError, IndexError) as error:
            reply = StoreReply(request.number, error=f"{request.operation} of {request.keys}: {error}")
        answer(reply)
        self._wake(request.generation)

    def _wake(self, generation: int) -> None:
        values, waiting = self._values[generation], self._waiting[generation]
        if not waiting:
            return
        self._waiting[generation] = still = []
        for request, answer in waiting:
            if all(key in values for key in request.keys):
                answer(StoreReply(request.number, tuple(values[key] for key in request.keys)))
            else:
                still.append((request, answer))


def _execute(request: StoreRequest, values: dict[str, bytes]) -> StoreReply:
    """Carry out a request whose keys exist, where they have to."""
    number, keys = request.number, request.keys
    match request.operation:
        case "get":
            return StoreReply(number, tuple(values[key] for key in keys))
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
