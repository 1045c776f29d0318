"""The faults that a plan can name, and where they strike. ``spark_elastic.testing``, the driver and workers use them."""

from __future__ import annotations

from enum import Enum

import msgspec

# The environment variables that tell workers which processes KILL_EXECUTOR and KILL_TASK kill.
EXECUTOR_VARIABLE = "SPARK_ELASTIC_EXECUTOR_PID"
TASK_VARIABLE = "SPARK_ELASTIC_TASK_PID"


class Point(Enum):
    """Where in a worker's life a fault can strike. At the first two points the worker has no rank yet."""

    BOOT = "boot"
    READY = "ready"
    FORM = "form"
    FORMED = "formed"
    REPAIR = "repair"
    SYNCED = "synced"
    COMMIT = "commit"
    RECORDED = "recorded"
    COMMITTED = "committed"
    RETURN = "return"
    FINISHED = "finished"
    RESULT = "result"


class Action(Enum):
    """What an injected fault does to its worker."""

    KILL = "kill"
    EXIT = "exit"
    SEGFAULT = "segfault"
    RAISE = "raise"
    STOP = "stop"
    HANG = "hang"
    KILL_TASK = "kill_task"
    KILL_EXECUTOR = "kill_executor"
    DRAIN = "drain"
    TAKE_AWAY = "take_away"
    GIVE_BACK = "give_back"


# The actions that end only the worker's process.
ENDING_ACTIONS = (Action.KILL, Action.EXIT, Action.SEGFAULT)
# The actions that change a cluster; the cluster has to allow it.
CLUSTER_ACTIONS = (Action.TAKE_AWAY, Action.GIVE_BACK)


class Fault(msgspec.Struct, frozen=True):
    """One fault of a plan. A field that is None matches everything; ``step`` counts explicit commits from 1.

    ``fault`` explains the other fields; ``number`` tells the faults of a plan apart.
    """

    number: int
    action: Action
    point: Point
    rank: int | None = None
    step: int | None = None
    generation: int | None = None
    times: int = 1
    code: int = 1
    grace: float = 30.0

    def __str__(self) -> str:
        places = {"rank": self.rank, "step": self.step, "generation": self.generation}
        told = [f"{name}={value}" for name, value in places.items() if value is not None]
        told += [] if self.point is Point.COMMIT else [f"at={self.point.value!r}"]
        return f"{self.action.value}({', '.join(told)})"


class InjectedFaultError(Exception):
    """Raised in user code by a fault whose action is RAISE."""
