"""Spark's container image, as far as its entry point and its hook go, without a file system of its own.

What a pod mounts lies in its folder, and paths below a mount in its arguments and environment are changed to lead there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyspark

from kube.store import Object

SPARK_HOME = Path(pyspark.__file__).parent
JAVA = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else shutil.which("java")
# In the environment of all processes of a pod, wherever they were re-parented to: a real one has a cgroup.
POD = "KUBE_POD_UID"
# Handed on from the tests, which look for what they have left behind.
MARK = "SPARK_ELASTIC_TEST_RUN"
# Tests that are killed leave nothing running.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# The seconds that Spark's decom.sh stays after it has signalled, whatever the JVM does.
HOOK_SECONDS = 30

# Pods have no resolver of their own either. A JVM takes a file of hosts; Python is taught in every interpreter's first import.
HOSTS = "KUBE_HOSTS"
SITE = f'''
import os, socket

def _with_hosts(getaddrinfo):
    def look(host, *rest, **more):
        name = host.decode() if isinstance(host, bytes) else host
        with open(os.environ["{HOSTS}"]) as lines:
            found = [line.split()[0] for line in lines if name in line.split()[1:]]
        return getaddrinfo(found[0] if found else host, *rest, **more)
    return look

if "{HOSTS}" in os.environ:
    socket.getaddrinfo = _with_hosts(socket.getaddrinfo)
'''


@dataclass(frozen=True)
class Mount:
    path: str
    folder: Path

    def holds(self, text: str) -> bool:
        return text == self.path or text.startswith(f"{self.path}/")


@dataclass(frozen=True)
class Container:
    """What is started for a pod."""

    command: list[str]
    environment: dict[str, str]
    hook: list[str]


def make_container(pod: Object, ip: str, folder: Path, hosts: Path, config_maps: dict[str, Object]) -> Container:
    """Make a pod's mounts in its folder and return its first container."""
    spec = pod["spec"]["containers"][0]
    mounts = _make_mounts(pod, spec, folder, config_maps)
    fields = {"status.podIP": ip, "metadata.name": pod["metadata"]["name"], "spec.nodeName": pod["spec"]["nodeName"]}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(hosts.parent / "site"),
        "JAVA_TOOL_OPTIONS": os.environ.get("JAVA_TOOL_OPTIONS", ""),
        "JDK_JAVA_OPTIONS": f"{os.environ.get('JDK_JAVA_OPTIONS', '')} -Djdk.net.hosts.file={hosts}",
        "TMPDIR": str(folder / "tmp"),
        "JAVA_HOME": str(Path(str(JAVA)).resolve().parents[1]),
        "SPARK_HOME": str(SPARK_HOME),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": ip,  # a pod has its host name for this
        HOSTS: str(hosts),
        POD: pod["metadata"]["uid"],
        MARK: os.environ.get(MARK, ""),
    }
    for entry in spec.get("env") or []:
        reference = (entry.get("valueFrom") or {}).get("fieldRef")
        value = fields[reference["fieldPath"]] if reference else entry.get("value") or ""
        environment[entry["name"]] = ",".join(_translate(part, mounts) for part in value.split(","))
    arguments = [_translate(argument, mounts) for argument in spec.get("args") or []]
    (folder / "tmp").mkdir(parents=True)
    hook = (((spec.get("lifecycle") or {}).get("preStop") or {}).get("exec") or {}).get("command") or []
    return Container(_entry_point(arguments, environment), environment, hook)


def _make_mounts(pod: Object, spec: Object, folder: Path, config_maps: dict[str, Object]) -> list[Mount]:
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    mounts = [
        Mount(mount["mountPath"].rstrip("/"), folder / "volumes" / mount["name"])
        for mount in spec.get("volumeMounts") or []
    ]
    for mount in mounts:
        mount.folder.mkdir(parents=True)
        volume = volumes[mount.folder.name]
        if "configMap" in volume:
            data = config_maps[volume["configMap"]["name"]].get("data") or {}
            items = volume["configMap"].get("items") or [{"key": name, "path": name} for name in data]
            for item in items:
                text = data[item["key"]]
                for other in mounts:  # Spark's settings name files of its other mounts
                    text = text.replace(f"{other.path}/", f"{other.folder}/")
                (mount.folder / item["path"]).write_text(text)
        else:
            assert "emptyDir" in volume, f"the stand-in has no volumes like {volume}"
    return mounts


def _translate(text: str, mounts: list[Mount]) -> str:
    found = max((mount for mount in mounts if mount.holds(text)), key=lambda mount: len(mount.path), default=None)
    return text if found is None else str(found.folder) + text[len(found.path) :]


def _entry_point(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """What the image's entry point runs in place of itself, under an init process that passes signals on to it alone."""
    role, *rest = arguments
    if role == "driver":
        bind = f"spark.driver.bindAddress={environment['SPARK_DRIVER_BIND_ADDRESS']}"
        return [str(SPARK_HOME / "bin" / "spark-submit"), "--conf", bind, "--deploy-mode", "client", *rest]
    assert role == "executor", arguments
    prefix = "SPARK_JAVA_OPT_"
    options = sorted(
        (int(name[len(prefix) :]), value) for name, value in environment.items() if name.startswith(prefix)
    )
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    given = {
        "driver-url": "SPARK_DRIVER_URL",
        "executor-id": "SPARK_EXECUTOR_ID",
        "cores": "SPARK_EXECUTOR_CORES",
        "app-id": "SPARK_APPLICATION_ID",
        "hostname": "SPARK_EXECUTOR_POD_IP",
        "resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
        "podName": "SPARK_EXECUTOR_POD_NAME",
    }
    return [
        str(JAVA), *(option for _, option in options), f"-Xms{memory}", f"-Xmx{memory}",
        "-cp", f"{environment['SPARK_CONF_DIR']}:{SPARK_HOME}/jars/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *(part for name, variable in given.items() for part in (f"--{name}", environment[variable])),
    ]  # fmt: skip


def processes_of(pod: Object) -> Iterator[psutil.Process]:
    """All living processes of a pod."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(POD) == pod["metadata"]["uid"] and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def run_hook(pod: Object, container: Container, grace: int) -> int:
    """Run the hook of a container. Of the image's own script only the beginning is run; return the seconds that it stays."""
    if container.hook[0] != "/opt/decom.sh":
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(container.hook, env=container.environment, timeout=grace, check=False)
        return 0
    for process in processes_of(pod):
        if process.name() == "java":
            _signal(process, signal.SIGPWR)
    return HOOK_SECONDS


def kill_all(pod: Object) -> None:
    """Leave nothing of a pod, as the end of its first process does to its namespace of processes."""
    while found := list(processes_of(pod)):
        for process in found:
            _signal(process, signal.SIGKILL)
        # A container's first process is a child of this one: whoever has started it waits for it, and wants its exit code.
        psutil.wait_procs([process for process in found if not _is_child(process)], timeout=1)


def _is_child(process: psutil.Process) -> bool:
    try:
        return process.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: Any) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
