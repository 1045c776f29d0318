"""The resources of a task for the stages of one job only, through Spark's ``ResourceProfile`` (stage-level scheduling).

The session's settings (``spark.task.cpus``, ``spark.task.resource.gpu.amount``) apply to all its other stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic._integers import whole_number

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

NAMES = ("cpus", "gpus")
# Returns a Spark setting, or the given default.
Setting = Callable[[str, str], str | None]


@dataclass(frozen=True, slots=True)
class TaskResources:
    """The cores and the part of a GPU that each task gets; None leaves that to the session.

    executor_cpus, executor_gpus: what the profile asks of executors, which only dynamic allocation can fulfil; None means the
    session's own. given: the profile, if the user has made it. name: what errors call it.
    """

    cpus: float | None = None
    gpus: float | None = None
    executor_cpus: int | None = None
    executor_gpus: int | None = None
    given: ResourceProfile | None = None
    name: str = field(default="resources", compare=False)

    @classmethod
    def of(cls, wanted: object, name: str = "resources") -> TaskResources:
        """Read ``{"cpus": 2, "gpus": 1}``, or a profile. Raises ``TypeError`` or ``ValueError``, which call it ``name``."""
        if not isinstance(wanted, Mapping):
            return cls._of_profile(wanted, name)
        unknown = sorted(set(wanted) - set(NAMES))
        if unknown or not wanted:
            raise ValueError(f"{name} takes cpus and gpus, as in {{'cpus': 2, 'gpus': 1}}, not {wanted!r}")
        cpus, gpus = wanted.get("cpus"), wanted.get("gpus")
        if cpus is not None:
            cpus = whole_number(f"{name}: cpus", cpus, 1)
        if gpus is not None and (not isinstance(gpus, (int, float)) or isinstance(gpus, bool) or not gpus > 0):
            raise ValueError(f"{name}: gpus must be 1, or a fraction that workers share, not {gpus!r}")
        check_one_gpu(gpus, f"{name} asks for {gpus} GPUs a task")
        return cls(cpus, gpus, name=name)

    @classmethod
    def of_session(cls, get: Setting) -> TaskResources:
        """Return what the session's configuration gives to tasks."""
        return cls(gpus=float(get("spark.task.resource.gpu.amount", "0") or 0) or None)

    @classmethod
    def _of_profile(cls, profile: Any, name: str) -> TaskResources:
        if hasattr(type(profile), "build"):
            raise TypeError(f"{name} must be a ResourceProfile, not a {type(profile).__name__}: append .build")
        try:
            task, executor = profile.taskResources, profile.executorResources
        except AttributeError:
            raise TypeError(
                f"{name} must be a dict such as {{'cpus': 2, 'gpus': 1}}, or a ResourceProfile, not {profile!r}"
            ) from None
        gpus = float(task["gpu"].amount) if "gpu" in task else None
        check_one_gpu(gpus, f"{name} asks for {gpus:g} GPUs a task" if gpus is not None else "")
        return cls(
            cpus=float(task["cpus"].amount) if "cpus" in task else None,
            gpus=gpus,
            executor_cpus=int(executor["cores"].amount) if "cores" in executor else None,
            executor_gpus=int(executor["gpu"].amount) if "gpu" in executor else None,
            given=profile,
            name=name,
        )

    def of_tasks(self) -> dict[str, float]:
        """Return the amounts that each task gets, by Spark's names."""
        if self.given is not None:
            return {name: request.amount for name, request in self.given.taskResources.items()}
        amounts = {"cpus": self.cpus, "gpu": self.gpus}
        return {name: amount for name, amount in amounts.items() if amount is not None}

    def of_executors(self, get: Setting) -> dict[str, tuple[int, str, str]]:
        """Return what executors must have for these tasks: the amount, discovery script and vendor of each resource.

        With dynamic allocation, executors are started for a profile, and have only the GPUs that it names.
        """
        if self.given is not None:
            found = self.given.executorResources.items()
            return {name: (asked.amount, asked.discoveryScript, asked.vendor) for name, asked in found}
        if self.gpus is None or not is_dynamic(get):
            return {}
        amount, script, vendor = (
            get(f"spark.executor.resource.gpu.{part}", "") or "" for part in ("amount", "discoveryScript", "vendor")
        )
        return {"gpu": (int(amount), script, vendor)}

    def check_executors(self, get: Setting) -> None:
        """Raise ``ValueError`` if executors have no GPU to give, or too few cores: tasks would wait forever."""
        gpus = self.executor_gpus or _whole(get("spark.executor.resource.gpu.amount", "0"))
        if self.gpus and not gpus:
            raise ValueError(
                f"{self.name} asks for a GPU a task, but executors have none: set spark.executor.resource.gpu.amount, with a "
                "discovery script, when the session is made"
            )
        cores = self.executor_cpus or _whole(get("spark.executor.cores", "0"))
        if self.cpus and cores and self.cpus > cores:
            raise ValueError(f"{self.name} asks for {self.cpus:g} cores a task, but an executor has {cores}")

    def cores(self, get: Setting) -> float:
        """Return the cores of a task."""
        return self.cpus or float(get("spark.task.cpus", "1") or 1)

    def slots_of_executor(self, get: Setting) -> int:
        """Return how many tasks an executor has room for at a time. A task's part of a GPU is of one GPU."""
        cores = self.executor_cpus or _whole(get("spark.executor.cores", "1"))
        slots = int(cores / self.cores(get))
        if self.gpus:
            gpus = self.executor_gpus or _whole(get("spark.executor.resource.gpu.amount", "0"))
            slots = min(slots, gpus * int(1 / self.gpus))
        return slots


def is_dynamic(get: Setting) -> bool:
    """Whether executors come and go with the tasks that wait for them."""
    return str(get("spark.dynamicAllocation.enabled", "false")).lower() == "true"


def check_one_gpu(amount: float | None, beginning: str) -> None:
    """Raise ``ValueError``, with this beginning of its message, if tasks are given several GPUs."""
    if amount is not None and amount > 1:
        raise ValueError(f"{beginning}, but a worker uses one GPU: set it to 1 and run more workers")


def known_profile(session: SparkSession, resources: TaskResources) -> ResourceProfile:
    """Return a profile that Spark knows. An equal profile of an earlier job is reused, with the executors that it has.

    Raises ``ValueError`` with Spark's own words if Spark cannot schedule by profiles.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.resource import ExecutorResourceRequests, ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

    context = session.sparkContext
    manager = context._jsc.sc().resourceProfileManager()
    profile = resources.given
    if profile is not None and profile._java_resource_profile is None:  # it was made before there was a session
        tasks = TaskResourceRequests(context._jvm, profile.taskResources)
        executors = ExecutorResourceRequests(context._jvm, profile.executorResources)
        profile = ResourceProfileBuilder().require(executors).require(tasks).build
    elif profile is None:
        tasks, executors = TaskResourceRequests(), ExecutorResourceRequests()
        for name, amount in resources.of_tasks().items():
            tasks = tasks.cpus(int(amount)) if name == "cpus" else tasks.resource(name, amount)
        for name, asked in resources.of_executors(context.getConf().get).items():
            executors = executors.resource(name, *asked)
        profile = ResourceProfileBuilder().require(executors).require(tasks).build
    known = manager.getEquivalentProfile(profile._java_resource_profile)
    if known.isDefined():
        return ResourceProfile(known.get())
    try:
        manager.addResourceProfile(profile._java_resource_profile)
    except Py4JJavaError as error:
        raise ValueError(f"resources= cannot be had here: {error.java_exception.getMessage()}") from None
    return profile


@dataclass(frozen=True)
class ServersProfile:
    """A profile that a Spark Connect server knows by this number."""

    id: int


# The profiles that servers have made for sessions, by their content.
_profiles: weakref.WeakKeyDictionary[ConnectSession, dict[bytes, ServersProfile]] = weakref.WeakKeyDictionary()


def connect_profile(session: ConnectSession, resources: TaskResources) -> ServersProfile:
    """Return a profile that this session's server knows. An equal profile of an earlier job is reused, with its executors.

    The server itself makes another one each time. pyspark's own ``ResourceProfile`` would use the active session.

    Raises ``ValueError`` with Spark's own words if Spark cannot schedule by profiles.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.connect import proto

    if not hasattr(session.client, "_create_profile"):
        raise ValueError("resources= with Spark Connect needs Spark 4.0 or later")
    tasks = {
        name: proto.TaskResourceRequest(resource_name=name, amount=amount)
        for name, amount in resources.of_tasks().items()
    }
    executors = {
        name: proto.ExecutorResourceRequest(resource_name=name, amount=amount, discovery_script=script, vendor=vendor)
        for name, (amount, script, vendor) in resources.of_executors(session.conf.get).items()
    }
    profile = proto.ResourceProfile(executor_resources=executors, task_resources=tasks)
    known = _profiles.setdefault(session, {})
    content = profile.SerializeToString(deterministic=True)
    if content not in known:
        try:
            known[content] = ServersProfile(int(session.client._create_profile(profile)))
        except PySparkException as error:
            raise ValueError(f"resources= cannot be had here: {error}") from None
    return known[content]


def _whole(value: str | None) -> int:
    return int(value or 0)
