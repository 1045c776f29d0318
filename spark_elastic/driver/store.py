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
        operation, keys = request.operation, request.keys
        if operation == "get" and not all(key in values for key in keys):
            self._waiting[request.generation].append((request, answer))
            return
        reply = StoreReply(request.number)
        if operation == "get":
            reply = StoreReply(request.number, tuple(values[key] for key in keys))
        elif operation == "check":
            reply = StoreReply(request.number, amount=int(all(key in values for key in keys)))
        elif operation == "set":
            values.update(zip(keys, request.values, strict=True))
        elif operation == "set_default":
            # The first value counts; everybody gets it.
            reply = StoreReply(
                request.number,
                tuple(values.setdefault(key, value) for key, value in zip(keys, request.values, strict=True)),
            )
        elif operation == "add":
            total = int(values.get(keys[0], b"0")) + request.amount
            values[keys[0]] = str(total).encode()
            reply = StoreReply(request.number, amount=total)
        elif operation == "delete":
            reply = StoreReply(request.number, amount=sum(values.pop(key, None) is not None for key in keys))
        answer(reply)
        if operation in ("set", "set_default", "add"):
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
