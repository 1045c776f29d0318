"""``Kubernetes``: the cluster from ``__enter__`` to ``__exit__``, and what a test does to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from aiohttp import web

from kube.api import make_api
from kube.image import POD, SITE
from kube.kubelet import Kubelets, Pod
from kube.store import Object, Query, Store

END_SECONDS = 30.0


@dataclass(frozen=True)
class PodFacts:
    """What the API shows of a pod at a time."""

    name: str
    labels: dict[str, str]
    phase: str
    reason: str
    code: int | None
    node: str | None
    # Whether it has been deleted, and is in its grace period.
    is_terminating: bool

    @property
    def is_alive(self) -> bool:
        return self.phase in ("Pending", "Running")


@dataclass(frozen=True)
class Change:
    """A change of a pod that watchers heard of."""

    time: float
    how: str
    pod: PodFacts


class Kubernetes:
    """Listens on a port of its own, on one thread. On exit nothing of it is left."""

    def __init__(self, folder: Path, nodes: dict[str, int]) -> None:
        self._folder = folder
        self._nodes = nodes
        self._store = Store()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kube")
        self._changed = threading.Condition()
        self.changes: list[Change] = []
        self.url = ""

    def __enter__(self) -> Kubernetes:
        (self._folder / "site").mkdir(parents=True)
        (self._folder / "site" / "sitecustomize.py").write_text(SITE)
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_SECONDS)
            self._loop.close()
        if error is None and self._kubelets.errors:
            raise self._kubelets.errors[0]

    async def _start(self) -> None:
        self._kubelets = Kubelets(self._store, self._folder, self._nodes)
        self._store.watch(Query("pods", "default"), 0, self._note)
        self._runner = web.AppRunner(make_api(self._store, self._kubelets.delete), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._kubelets.end()
        await self._runner.cleanup()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(END_SECONDS)
        except FutureTimeoutError:
            future.cancel()
            raise

    def _note(self, change: Object) -> None:
        with self._changed:
            self.changes.append(Change(time.time(), change["type"], _facts(change["object"])))
            self._changed.notify_all()

    # ------------------------------------------------------------------ what tests see

    def pods(self, role: str = "executor") -> list[PodFacts]:
        """The pods that the API shows, oldest first."""

        async def look() -> list[PodFacts]:
            return [_facts(obj) for obj in self._store.all("pods")]

        return [pod for pod in self._call(look()) if pod.labels.get("spark-role") == role]

    def wait_for(self, condition: Callable[[list[PodFacts]], bool], seconds: float = 60.0) -> None:
        """Wait until the executors that the API shows meet a condition."""
        deadline = time.monotonic() + seconds
        while True:
            seen = len(self.changes)
            pods = self.pods()
            if condition(pods):
                return
            with self._changed:
                self._changed.wait_for(lambda seen=seen: len(self.changes) > seen, deadline - time.monotonic())
            assert time.monotonic() < deadline, f"after {seconds} s: {pods}"

    def pod_of(self, process: int) -> str:
        """The pod that a process runs in."""
        uid = psutil.Process(process).environ()[POD]
        return next(name for name, pod in self._kubelets.pods.items() if pod.obj["metadata"]["uid"] == uid)

    def node_of(self, pod: str) -> str:
        """The node that a pod runs on."""
        return str(self._pod(pod).obj["spec"]["nodeName"])

    def environment_of(self, pod: str) -> dict[str, str]:
        """What a pod's container was started with."""
        container = self._pod(pod).container
        assert container is not None
        return container.environment

    def folder_of(self, pod: str) -> Path:
        """Where a pod has its volumes, and the log of its container."""
        return self._folder / pod

    # ------------------------------------------------------------------ what tests do

    def kill(self, pod: str, reason: str = "Error") -> None:
        """Kill a pod's container, by the kernel for its memory for example (``OOMKilled``)."""
        self._call(self._kubelets.kill(self._pod(pod), reason))

    def evict(self, pod: str) -> None:
        """Delete a pod with its grace, as the drain of its node does."""

        async def delete() -> None:
            self._kubelets.delete("pods", self._pod(pod).obj)

        self._call(delete())

    def set_room(self, node: str, room: int) -> None:
        """Let a node, a new one perhaps, take so many pods; what runs there stays."""

        async def set_room() -> None:
            self._kubelets.nodes[node] = room
            self._kubelets.look()

        self._call(set_room())

    def lose_node(self, name: str) -> list[str]:
        """End a node at once; what ran there shows as running until it is forgotten. Return its pods."""
        return list(self._call(self._kubelets.lose(name)))

    def forget(self, pod: str) -> None:
        """Delete a pod of a lost node without grace, as its control plane does after some minutes."""

        async def delete() -> None:
            self._kubelets.delete("pods", self._pod(pod).obj, 0)

        self._call(delete())

    def _pod(self, name: str) -> Pod:
        return self._kubelets.pods[name]


def _facts(obj: Object) -> PodFacts:
    metadata, status = obj["metadata"], obj["status"]
    ended = [entry["state"].get("terminated") or {} for entry in status.get("containerStatuses", [])] or [{}]
    return PodFacts(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        phase=status["phase"],
        reason=ended[0].get("reason", ""),
        code=ended[0].get("exitCode"),
        node=obj["spec"].get("nodeName"),
        is_terminating="deletionTimestamp" in metadata,
    )
