"""Scheduler, kubelets and garbage collector: what becomes of the store's pods. Runs on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kube.image import DIE_WITH_PARENT, Container, kill_all, make_container, run_hook
from kube.store import Object, Query, Store, now

# A container that has no grace left gets this much after its hook.
LAST_SECONDS = 2
# Addresses of pods, of all clusters of this process; other processes take others.
_addresses = (
    f"127.{1 + os.getpid() // 250 % 250}.{1 + os.getpid() % 250}.{host}" for host in itertools.cycle(range(2, 250))
)


@dataclass(eq=False)
class Pod:
    """A pod that has a node."""

    obj: Object
    ip: str
    folder: Path
    # Both from the moment when it has started.
    process: asyncio.subprocess.Process | None = None
    container: Container | None = None
    # Why its container is about to end, where that is not for what it does by itself.
    reason: str = ""
    # Whether nobody is left who could tell the API of its end.
    is_cut_off: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])


class Kubelets:
    """All nodes of the cluster, with room for so many pods each."""

    def __init__(self, store: Store, folder: Path, nodes: dict[str, int]) -> None:
        self._store = store
        self._folder = folder
        self._hosts = folder / "hosts"
        self._tasks: set[asyncio.Task[None]] = set()
        # What went wrong in the stand-in itself.
        self.errors: list[BaseException] = []
        self.nodes = dict(nodes)
        self.pods: dict[str, Pod] = {}
        for plural in ("pods", "services", "configmaps"):
            store.watch(Query(plural, "default"), 0, lambda change: self.look())

    def look(self) -> None:
        """Look at the store again once the present change is through."""
        asyncio.get_running_loop().call_soon(self._schedule)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.errors.append(error)

    def _schedule(self) -> None:
        self._write_hosts()
        for obj in self._store.all("pods"):
            name = obj["metadata"]["name"]
            is_waiting = "nodeName" not in obj["spec"] and "deletionTimestamp" not in obj["metadata"]
            node = self._find_room(obj) if is_waiting and self._has_config_maps(obj) else None
            if node is not None:
                obj["spec"]["nodeName"] = node
                self.pods[name] = Pod(obj, next(_addresses), self._folder / name)
                self._spawn(self._run(self.pods[name]))

    def _has_config_maps(self, obj: Object) -> bool:
        """A pod may be made before what it mounts, and waits for it."""
        there = {config_map["metadata"]["name"] for config_map in self._store.all("configmaps")}
        volumes = obj["spec"].get("volumes") or []
        return {volume["configMap"]["name"] for volume in volumes if "configMap" in volume} <= there

    def _find_room(self, obj: Object) -> str | None:
        wanted = (obj["spec"].get("nodeSelector") or {}).get("kubernetes.io/hostname")
        for node, room in self.nodes.items():
            taken = [
                pod for pod in self.pods.values() if pod.obj["spec"]["nodeName"] == node and not pod.ended.is_set()
            ]
            if len(taken) < room and wanted in (None, node):
                return node
        return None

    def _write_hosts(self) -> None:
        """The cluster's names: a headless service is the address of the pod that it selects."""
        lines = ["127.0.0.1 localhost", f"127.0.0.1 {os.uname().nodename}"]
        for service in self._store.all("services"):
            metadata, selector = service["metadata"], service["spec"].get("selector") or {}
            for pod in self.pods.values():
                if selector.items() <= (pod.obj["metadata"].get("labels") or {}).items() and not pod.ended.is_set():
                    name = f"{metadata['name']}.{metadata['namespace']}.svc"
                    lines.append(f"{pod.ip} {name} {name}.cluster.local")
        new = self._hosts.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self._hosts)

    # ------------------------------------------------------------------ one pod

    async def _run(self, pod: Pod) -> None:
        try:
            await self._run_container(pod)
        finally:
            pod.started.set()
            pod.ended.set()
            self.look()

    async def _run_container(self, pod: Pod) -> None:
        maps = {obj["metadata"]["name"]: obj for obj in self._store.all("configmaps")}
        pod.container = container = make_container(pod.obj, pod.ip, pod.folder, self._hosts, maps)
        self._write_hosts()
        with open(pod.folder / "log", "w") as log:
            pod.process = process = await asyncio.create_subprocess_exec(
                *DIE_WITH_PARENT, *container.command, env=container.environment, cwd=pod.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        pod.started.set()
        self._show(pod, "Running", {"running": {"startedAt": now()}})
        code = await process.wait()
        await asyncio.to_thread(kill_all, pod.obj)
        code = 128 - code if code < 0 else code
        if not pod.is_cut_off:
            reason = pod.reason or ("Error" if code else "Completed")
            self._show(pod, "Failed" if code else "Succeeded", {"terminated": {"exitCode": code, "reason": reason}})

    def _show(self, pod: Pod, phase: str, state: Object) -> None:
        status = pod.obj["status"]
        name = pod.obj["spec"]["containers"][0]["name"]
        is_running = phase == "Running"
        status.update(phase=phase, podIP=pod.ip, hostIP="127.0.0.1")
        status.setdefault("startTime", now())
        status["containerStatuses"] = [
            {"name": name, "ready": is_running, "restartCount": 0, "image": "", "imageID": "", "state": state}
        ]
        self._store.modified("pods", pod.obj)

    async def kill(self, pod: Pod, reason: str) -> None:
        """SIGKILL all that runs in a pod."""
        pod.reason = reason
        await pod.started.wait()
        await asyncio.to_thread(kill_all, pod.obj)
        await pod.ended.wait()

    def delete(self, plural: str, obj: Object, grace: int | None = None) -> None:
        """Take an object away, and what it owns; a pod that runs gets its grace first, whoever deletes it."""
        pod = self.pods.get(obj["metadata"]["name"]) if plural == "pods" else None
        if pod is not None and pod.is_cut_off and grace != 0:
            obj["metadata"].setdefault("deletionTimestamp", now())  # and nobody is there who does it
            self._store.modified("pods", obj)
        elif pod is None or pod.obj is not obj or pod.ended.is_set() or grace == 0:
            if pod is not None and not pod.ended.is_set():
                self._spawn(self.kill(pod, "Error"))
            self._remove(plural, obj)
        elif "deletionTimestamp" not in obj["metadata"]:
            grace = obj["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
            obj["metadata"].update(deletionTimestamp=now(), deletionGracePeriodSeconds=grace)
            self._store.modified("pods", obj)
            self._spawn(self._terminate(pod, grace))

    def _remove(self, plural: str, obj: Object) -> None:
        self._store.remove(plural, obj)
        for owned in self._store.owned_by(obj):
            self.delete(*owned)

    async def _terminate(self, pod: Pod, grace: int) -> None:
        """The hook, SIGTERM to the first process, and SIGKILL once the grace period is over."""
        end = time.monotonic() + grace
        await pod.started.wait()
        assert pod.container is not None
        assert pod.process is not None
        if pod.container.hook:
            stay = await asyncio.to_thread(run_hook, pod.obj, pod.container, grace)
            if not await _within(pod, min(stay, grace)):
                end = max(end, time.monotonic() + LAST_SECONDS)
        if not pod.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                pod.process.send_signal(signal.SIGTERM)
        if not await _within(pod, end - time.monotonic()):
            await self.kill(pod, "Error")
        self._remove("pods", pod.obj)

    async def lose(self, node: str) -> list[str]:
        """End a node without anybody to tell of it: its pods show what they last showed. Return their names."""
        del self.nodes[node]
        lost = [pod for pod in self.pods.values() if pod.obj["spec"]["nodeName"] == node and not pod.ended.is_set()]
        for pod in lost:
            pod.is_cut_off = True
        await asyncio.gather(*(self.kill(pod, "NodeLost") for pod in lost))
        return [pod.name for pod in lost]

    async def end(self) -> None:
        """Kill all pods."""
        self.nodes.clear()
        await asyncio.gather(*(self.kill(pod, "Error") for pod in self.pods.values() if not pod.ended.is_set()))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _within(pod: Pod, seconds: float) -> bool:
    """Whether a pod's container ends within so many seconds."""
    try:
        await asyncio.wait_for(pod.ended.wait(), max(seconds, 0))
    except asyncio.TimeoutError:
        return False
    return True
