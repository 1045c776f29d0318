"""ObjectState: any objects go back by value or in place, and keep what is their own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from worker_stage import on_stage

from spark_elastic.checkpoint.content import encode
from spark_elastic.checkpoint.skeleton import pickled
from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import DataError
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.state.objects import ObjectState


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> int:
        return row


def test_objects_are_attributes_and_go_back_to_the_last_commit() -> None:
    state = ObjectState(epoch=0, log=[])
    state.commit()
    state.epoch, state.new = 5, "x"
    state.log.append(1)
    state.restore()
    assert (state.epoch, state.log) == (0, [])


def test_attributes_that_are_set_later_belong_to_the_state() -> None:
    state = ObjectState()
    state.best = 3
    state.commit()
    state.best = 4
    state.restore()
    assert state.best == 3


def test_outside_a_job_entering_the_function_is_something_to_go_back_to() -> None:
    @elastic
    def train(state: ObjectState) -> int:
        state.epoch += 1
        state.restore()
        return state.epoch

    state = ObjectState(epoch=0)
    state.epoch = 5
    assert train(state) == 5


def test_in_a_job_a_restore_ahead_of_the_first_generation_does_nothing() -> None:
    with on_stage():
        state = ObjectState(epoch=7)
        state.epoch = 8
        state.restore()
        assert state.epoch == 8


def test_a_restore_can_be_repeated() -> None:
    state = ObjectState(log=[1])
    state.commit()
    for _ in range(2):
        state.log.append(2)
        state.restore()
        assert state.log == [1]


def test_a_name_in_local_that_is_no_objects_gets_one_warning() -> None:
    state = ObjectState(epoch=0, mine=0, local=("mien", "later"))
    state.later = 1
    state.commit()
    with pytest.warns(UserWarning, match=r"local=\['mien'\] names nothing .* which holds epoch, mine") as told:
        state.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.commit()
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("name", ["commit", "save", "donor", "_private"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ObjectState(**{name: 1})


def test_local_objects_are_saved_and_restored_on_their_rank() -> None:
    state = ObjectState(epoch=0, local={"seen": 1})
    state.commit()
    state.seen = 2
    state.restore()
    assert state.seen == 1


def test_local_objects_are_never_part_of_what_travels() -> None:
    state = ObjectState(epoch=0, seen=1, local="seen")
    state.commit()
    assert state._keeper.current.content()["objects"] == {"epoch": 0}


def test_a_commit_that_cannot_be_copied_leaves_the_one_before() -> None:
    state = ObjectState(epoch=0, thing=1)
    state.commit()
    state.epoch, state.thing = 1, (entry for entry in ())
    with pytest.raises(TypeError):
        state.commit()
    state.thing = None
    state.restore()
    assert (state.epoch, state.thing) == (0, 1)


def test_an_attribute_that_was_set_after_the_last_commit_is_gone_after_a_restore() -> None:
    state = ObjectState(epoch=0)
    state.commit()
    state.cursor = 17
    state.restore()
    assert not hasattr(state, "cursor"), "the survivor has it, a newcomer repaired from it has not"


def test_an_object_that_gets_a_state_dict_after_the_commit_goes_back_to_what_it_was() -> None:
    state = ObjectState(ema=None)
    state.commit()
    state.ema = torch.nn.Linear(1, 1)
    state.restore()
    assert state.ema is None


def test_a_state_dict_of_the_users_own_freezes_nothing() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    loaded = torch.nn.Linear(2, 2)
    loaded.load_state_dict(model.state_dict())
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_a_name_that_commits_would_leave_out_is_refused_where_it_is_set() -> None:
    state = ObjectState(epoch=0)
    with pytest.raises(
        ValueError, match="'_best' cannot be the name of an object of a ObjectState, because commits leave out"
    ):
        state._best = 0.5


def test_a_subclass_may_set_names_of_its_own_that_are_not_kept() -> None:
    class Mine(ObjectState):
        def __init__(self) -> None:
            super().__init__(epoch=0)
            self._cache = 1

    state = Mine()
    state._cache = 2
    state.commit()
    state._cache = 3
    state.restore()
    assert (state._cache, state.epoch) == (3, 0)


def test_a_loader_goes_on_from_the_last_commit_and_is_not_iterated_twice() -> None:
    loader = ElasticDataLoader(Rows(), global_batch_size=2, shuffle=False)
    state = ObjectState(loader=loader, seen=[])

    @elastic
    def read(state: ObjectState) -> None:
        for batch in state.loader:
            state.seen += batch.tolist()
            state.commit()
            if len(state.seen) == 4:
                break
        state.seen += [row for batch in state.loader for row in batch.tolist()]
        list(state.loader)
        with pytest.raises(DataError, match=r"set_epoch\(1\) forgotten"):
            list(state.loader)

    read(state)
    assert state.seen == [0, 1, 2, 3, 4, 5]


class WithLock(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return threading.Lock()

    def set_extra_state(self, state: object) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ObjectState(lock=threading.Lock()), "state.lock is a lock, which a commit cannot copy"),
        (lambda: ObjectState(box={"a": [1, threading.Lock()]}), r"state.box\['a'\]\[1\] is a lock"),
        (lambda: ObjectState(epoch=0, local={"rows": (row for row in ())}), "state.rows is a generator"),
        (lambda: ObjectState(net=WithLock(1, 1)), "the state_dict of state.net has a lock"),
    ],
)
def test_what_a_commit_cannot_copy_is_named_with_what_to_do(make: Callable[[], ObjectState], told: str) -> None:
    with pytest.raises(TypeError, match=rf"{told}.*\(cannot pickle .*outside the State"):
        make().commit()


def test_in_a_job_what_cannot_be_copied_is_named_ahead_of_the_first_commit() -> None:
    with on_stage():
        state = ObjectState(lock=threading.Lock())
        with pytest.raises(TypeError, match=r"state\.lock is a lock, which a commit cannot copy"):
            state._prepare()


class Copyable:
    """Can be copied, and cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Copyable:
        return Copyable()


def test_what_cannot_be_pickled_is_named_where_it_would_have_to_be() -> None:
    state = ObjectState(epoch=0, meter=Copyable())
    state.commit()
    kept = state._lend().lend()
    with pytest.raises(TypeError, match=r"state.meter cannot be pickled, so it cannot be written .* in local="):
        encode(kept)
    with pytest.raises(TypeError, match=r"state.meter cannot be pickled, so it cannot be sent"):
        pickled((kept.skeleton, 1), kept.skeleton, "sent to another worker")
