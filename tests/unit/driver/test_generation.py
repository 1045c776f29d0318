"""Generation: its ranks, and the phases that it enters."""

from __future__ import annotations

from itertools import product

import pytest

from spark_elastic.driver.generation import Generation
from spark_elastic.driver.phases import WORLD, IllegalTransition, WorldChange, WorldPhase
from spark_elastic.protocol.messages import Member


def of_workers(*workers: int) -> Generation:
    members = tuple(Member(worker, rank, 0, 1, rank, len(workers), None) for rank, worker in enumerate(workers))
    return Generation(3, members, since=1.0)


def test_workers_are_named_in_the_order_of_their_ranks_whatever_their_numbers() -> None:
    world = of_workers(0, 7, 2)
    assert world.ranks == {0: 0, 7: 1, 2: 2}
    assert world.workers == (0, 7, 2)


def test_every_change_leads_where_the_table_says_and_any_other_leaves_the_phase_and_raises() -> None:
    for phase, change in product(WorldPhase, WorldChange):
        world = of_workers(0)
        world.phase = phase
        if (phase, change) in WORLD:
            world.enter(change)
            assert world.phase is WORLD[phase, change]
        else:
            with pytest.raises(IllegalTransition, match=f"generation 3 is {phase.name}, where {change.name}"):
                world.enter(change)
            assert world.phase is phase
