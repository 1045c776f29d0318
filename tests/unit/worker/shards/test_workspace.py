"""The memory in which shards are added up: where values lie, what counts as zeros, and that it is used again."""

from __future__ import annotations

import torch

from spark_elastic.worker.shards.workspace import Layout, Workspace


def test_slots_are_aligned_and_flat_tensors_can_be_cut_evenly_among_the_ranks() -> None:
    like = {4: torch.empty(3, 5), 1: torch.empty(70), 2: torch.empty(2, dtype=torch.float64), 3: torch.empty(0)}
    found = Layout(like, 7).contribution()
    assert {place: slot.shape for place, slot in found.slots.items()} == {p: t.shape for p, t in like.items()}
    assert [(flat.dtype, flat.numel() % 7) for flat in found.flat] == [(torch.float32, 0), (torch.float64, 0)]
    assert {slot.data_ptr() % 64 for place, slot in found.slots.items() if place != 3} == {0}
    for place, slot in found.slots.items():
        slot.fill_(place)
    assert all(bool((slot == place).all()) for place, slot in found.slots.items())


def test_a_place_without_a_slot_is_added_to_zeros_as_in_a_slot() -> None:
    workspace = Workspace()
    workspace.lay_out({0: torch.empty(1)}, 1)
    left, right = workspace.at(0), workspace.at(1)
    for each, values in ((left, (2.0, -0.0)), (right, (3.0,))):
        each.slots[0].fill_(values[0])
        for place, value in enumerate(values, 5):
            each.put(place, torch.tensor([value]))
    left.add(right)
    assert left.slots[0].tolist() == [5.0]
    assert left.others[5].tolist() == [5.0]
    assert str(left.others[6].tolist()) == "[0.0]"


def test_a_depth_has_the_same_memory_in_each_loop_and_nothing_left_of_the_last_one() -> None:
    workspace = Workspace()
    workspace.lay_out({0: torch.empty(3)}, 2)
    first = workspace.at(0)
    first.put(9, torch.ones(1))
    again = workspace.at(0)
    assert again is first
    assert again.others == {}
    assert workspace.at(1).flat[0].data_ptr() != first.flat[0].data_ptr()


def test_slots_fit_places_whose_shapes_and_dtypes_are_still_the_same() -> None:
    workspace = Workspace()
    parameter = torch.nn.Parameter(torch.empty(3))
    like = {0: torch.empty(2), 1: parameter}
    workspace.lay_out(like, 1)
    assert workspace.has_slots_for({0: torch.empty(2), 1: torch.empty(3)})
    assert not workspace.has_slots_for({0: torch.empty(2)})
    assert not workspace.has_slots_for({**like, 0: torch.empty(4)})
    parameter.data = parameter.data.bfloat16()
    assert not workspace.has_slots_for(like)
