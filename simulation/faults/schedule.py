"""What a seed determines: a job, a cluster, and the faults that strike them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from simulation.product.training import Dataset
from spark_elastic.worker.optimizers.zero import divides


class Kind(Enum):
    """A fault. Faults of a worker or task strike the one that is picked, or the one that has reached the fault's point."""

    KILL = "its process is killed"
    EXIT = "it exits by itself"
    RAISE = "the user's function raises"
    STOP = "its process is stopped for a while"
    STOP_FOR_EVER = "its process is stopped"
    LONG_CODE = "it sits in user code for a while"
    LONG_CODE_BEATING = "it sits in user code for a while, with heartbeats"
    HOLD_GIL = "one long call holds the lock of its Python for a while"
    EVALUATE = "all ranks sit in user code for a while, which is shorter than hang_timeout"
    HANG = "it never comes back from user code"
    LOSE_CONTROL = "its connection to the driver is lost"
    LAG = "its connection to the driver is slow for a while"
    KILL_TASK = "its Spark task is killed"
    STOP_TASK = "its Spark task is stopped for a while"
    LOSE_TASK_CONTROL = "the connection of its task to the driver is lost"
    BREAK_WARM_PARENT = "its warm parent is killed"
    DRAIN = "its executor drains, and goes when its tasks have ended"
    DRAIN_BY = "its executor drains, and goes at a deadline"
    UNLIST = "its machine is not listed by host discovery for a while"
    LOSE_EXECUTOR = "its executor is killed"
    FREEZE_MACHINE = "its machine is paused for a while"
    LOSE_MACHINE = "its machine is gone without a goodbye"
    SLOW_MACHINE = "its machine is slow for a while"
    CUT = "its machine does not reach the driver for a while"
    ISOLATE = "its machine does not reach the other machines for a while"
    BLOCK_PORTS = "nobody can connect to the workers of its executor for a while, which reach the driver"
    FAIL_NEWCOMERS = "every newcomer raises before it has the state, for a while"
    BLACK_HOLE = "its connections to other workers swallow all packets, for as long as its world lasts"
    DUPLICATE = "Spark starts a speculative duplicate of a slot"
    ADD_EXECUTOR = "Spark gets another executor"
    PAUSE_DRIVER = "the driver's process is paused for a while"
    CANCEL = "the user presses Ctrl-C"


_WEIGHTS = {Kind.KILL: 6, Kind.CANCEL: 0.5, Kind.STOP_FOR_EVER: 1.5, Kind.DRAIN: 2, Kind.DRAIN_BY: 2, Kind.EXIT: 2}
# Kinds that were added later. They replace half of the faults of another kind, so that everything else in a seed's schedule
# stays the same.
_HALF_OF = {
    Kind.LONG_CODE: Kind.HOLD_GIL,
    Kind.LONG_CODE_BEATING: Kind.EVALUATE,
    Kind.ISOLATE: Kind.BLOCK_PORTS,
    Kind.DUPLICATE: Kind.FAIL_NEWCOMERS,
    Kind.LAG: Kind.BLACK_HOLE,
}

# Named places of the protocol, and how often they are chosen.
POINTS = {
    "BOOT": 1,
    "READY": 2,
    "FORM": 3,
    "FORMED": 3,
    "REPAIR": 4,
    "TRANSFER": 4,
    "SYNCED": 3,
    "CALLBACK": 2,
    "STEP": 3,
    "REDUCED": 3,
    "STEPPED": 4,
    "COMMIT": 2,
    "RECORDED": 4,
    "COMMITTED": 3,
    "RETURN": 3,
    "FINISHED": 1,
    "RESULT": 1,
}


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """Strikes at a time, or when any workers reach ``point`` for the ``nth`` time, or ``follows`` seconds after the previous
    fault. ``pick`` chooses who is hit.

    With a point, it strikes the worker that has come there, or the picked one if ``other`` is set.
    """

    number: int
    kind: Kind
    at: float
    point: str | None
    nth: int
    follows: float | None
    pick: int
    other: bool
    seconds: float

    def __str__(self) -> str:
        when = f"at {self.at:.2f} s" if self.point is None else f"at {self.point} no. {self.nth}"
        if self.follows is not None:
            when = f"{self.follows:.2f} s after fault {self.number - 1}"
        whom = "another worker" if self.point is not None and self.other else "a worker"
        return f"fault {self.number}: {when}, {whom}: {self.kind.value} ({self.kind.name}, {self.seconds:.1f} s)"


@dataclass(frozen=True, slots=True)
class Job:
    min_np: int
    num_proc: int
    max_np: int
    durable: bool
    in_place: bool
    data: Dataset
    epochs: int
    step_seconds: float
    # Commits at the end of an epoch, without a step between them.
    commits_of_epoch: int
    # Whether users reduce something between the optimizer's step and the commit.
    reduces_metrics: bool
    # Whether user code continues after a failed reduction, as if the batch had been too large.
    swallows_errors: bool
    # Whether copies are made by a GPU, after commits have returned.
    on_gpu: bool
    replaces_slow: bool
    # How many resets failures may cause.
    reset_limit: int | None
    # Whether fewer workers train if that is faster, by times that are drawn at random.
    adapts: bool
    # How many neighbours may be lost if ranks hold commits only together; 0 if each rank holds whole commits.
    redundancy: int
    # Whether the optimizer's state is divided among ranks; commits are then kept in slices or as copies.
    is_divided: bool
    in_slices: bool
    # After how many commits ranks exchange values, if each commit has a step.
    commits_per_exchange: int
    machines: int
    executors: int
    cores: int


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    job: Job
    faults: tuple[SimulatedFault, ...]


_DATA = (
    Dataset((9, 14, 7, 10), 4, None, 8),
    Dataset((30, 20), 1, None, 11),
    Dataset((12, 12, 12), 3, 4, None),
    Dataset((8, 8, 8, 8, 9), 5, 3, None),
    Dataset((64,), 2, None, 16),
)


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    dice, further = random.Random(seed), random.Random(f"commits {seed}")
    max_np = dice.choice((1, 2, 2, 2, 2, 3, 3, 3, 4, 5))
    min_np = dice.randint(1, max_np)
    if dice.random() < 0.5:
        min_np = min(min_np, 2)
    executors = dice.randint(max(1, max_np - 1), max_np)
    cores = -(-max_np // executors) + (dice.random() < 0.3)
    num_proc, durable, in_place = dice.randint(min_np, max_np), dice.random() < 0.4, dice.random() < 0.5
    on_gpu, slices = random.Random(f"gpu {seed}").random() < 0.3, random.Random(f"slices {seed}")
    is_joint = slices.random() < 0.5 and not in_place and not on_gpu
    redundancy, division = slices.choice((1, 2)) if is_joint else 0, random.Random(f"division {seed}")
    is_divided = is_joint and divides(max_np, redundancy) and division.random() < 0.5
    limit = random.Random(f"limit {seed}")
    job = Job(
        min_np=min_np,
        num_proc=num_proc,
        max_np=max_np,
        durable=durable,
        in_place=in_place,
        data=dice.choice(_DATA),
        epochs=dice.choice((1, 1, 1, 1, 2)),
        step_seconds=dice.choice((0.02, 0.1, 0.3)),
        commits_of_epoch=(dice.random() < 0.8) * further.choice((1, 4)),
        reduces_metrics=dice.random() < 0.3,
        swallows_errors=dice.random() < 0.3,
        on_gpu=on_gpu,
        replaces_slow=random.Random(f"slow {seed}").random() < 0.3,
        reset_limit=limit.choice((0, 1, 2, 4)) if limit.random() < 0.2 else None,
        adapts=random.Random(f"fewer {seed}").random() < 0.3,
        redundancy=redundancy,
        is_divided=is_divided,
        in_slices=is_joint and not (is_divided and division.random() < 0.5),
        commits_per_exchange=further.choice((1, 2, 3, 8)),
        machines=dice.randint(1, executors),
        executors=executors,
        cores=cores,
    )
    count = dice.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8))
    return Schedule(seed, job, tuple(_make_fault(dice, seed, number) for number in range(count)))


def _make_fault(dice: random.Random, seed: int, number: int) -> SimulatedFault:
    kinds = [kind for kind in Kind if kind not in _HALF_OF.values()]
    kind = dice.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
    if kind in _HALF_OF and random.Random(f"kind {seed} {number}").random() < 0.5:
        kind = _HALF_OF[kind]
    follows = dice.choice((0.0, 0.01, 0.1, 1.0)) * dice.random() if number and dice.random() < 0.3 else None
    has_point = follows is None and dice.random() < 0.7
    point = dice.choices(list(POINTS), list(POINTS.values()))[0] if has_point else None
    nth = min(1 + int(dice.expovariate(0.25)), 40)
    return SimulatedFault(
        number=number,
        kind=kind,
        at=dice.uniform(0.2, 6.0),
        point=point,
        nth=nth,
        follows=follows,
        pick=dice.randrange(1000),
        other=dice.random() < 0.25,
        seconds=dice.choice((0.3, 1.5, 4.0, 7.0, 12.0)) * dice.uniform(0.8, 1.2),
    )
