"""What users call on a State, and what they write in one of their own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from worker_stage import on_stage

from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import SparkElasticError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.protocol.reports import Metrics
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.elastic import elastic
from spark_elastic.worker.state.base import State
from spark_elastic.worker.state.objects import ObjectState
from spark_elastic.worker.state.torch_state import TorchState


class Own(State):
    """A State of the user's own, which keeps nothing."""

    data: object = None

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="elastic takes a function, not 3"):
        elastic(3)
    with pytest.raises(TypeError, match="callbacks must be callable, not 3"):
        ObjectState().register_reset_callbacks([print, 3])
    with pytest.raises(TypeError, match=r"called as callback\(old_size, new_size\), which <function .*> does not take"):
        ObjectState().register_reset_callbacks([lambda: None])  # type: ignore[misc, list-item]
    with pytest.raises(TypeError, match=r"a list of functions, not one: write \[print\]"):
        ObjectState().register_reset_callbacks(print)  # type: ignore[arg-type]


def test_an_elastic_function_is_simply_called_outside_a_job() -> None:
    @elastic
    def train(state: ObjectState, add: int, *, times: int = 1) -> int:
        state.epoch += add * times
        state.commit()
        state.check_host_updates()
        state.heartbeat()
        state.report(loss=1.0)
        return state.epoch

    assert train(ObjectState(epoch=1), 2, times=3) == 7
    assert train.__name__ == "train"


def test_the_first_argument_of_an_elastic_function_is_a_state() -> None:
    with pytest.raises(TypeError, match="is a State, not dict"):
        elastic(lambda state: None)({})


def test_a_state_whose_class_forgets_its_base_is_named() -> None:
    class Mine(ObjectState):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"^Mine.__init__ has to call super\(\).__init__\(\)"):
        elastic(lambda state: None)(Mine())


def test_reset_callbacks_run_at_every_generation_but_the_first() -> None:
    calls: list[tuple[int, int]] = []
    with on_stage() as stage:
        state = ObjectState()
        state.register_reset_callbacks([lambda old, new: calls.append((old, new))])
        stage.begin(state)
        stage.begin(state, others=[CommitId(1, 0)], previous_size=4)
    assert calls == [(4, 2)]


def test_a_state_of_the_users_own_is_counted_too() -> None:
    with on_stage() as stage:
        state = Own()
        stage.begin(state)
        state.commit()
        assert stage.control.commit == CommitId(1, 1)
        assert state.donor == 0


def test_a_state_that_holds_what_trains_and_does_not_look_at_it_causes_a_warning_at_first() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with on_stage() as stage:
        state = ObjectState(nested={"optimizer": [optimizer]})
        with pytest.warns(UserWarning, match=r"^ObjectState does not look for mistakes .* Write state = se.TorchState"):
            stage.begin(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stage.begin(state, others=[CommitId(1, 0)])
    for silent in (ObjectState(epoch=0), TorchState(optimizer=optimizer)):
        with on_stage() as stage, warnings.catch_warnings():
            warnings.simplefilter("error")
            stage.begin(silent)


def test_a_state_of_the_users_own_warns_that_it_does_not_divide_the_rows_of_its_loader() -> None:
    with on_stage() as stage:
        own = Own()
        own.data = ElasticDataLoader(range(8), global_batch_size=4)
        with pytest.warns(UserWarning, match="Own does not divide the rows of its data: every rank gets all of them"):
            stage.begin(own)
        assert [len(batch) for batch in own.data] == [4, 4]


def test_models_on_shards_are_refused_in_a_state_that_would_reduce_nothing() -> None:
    """Ranks trained apart, each on its rows, and the job succeeded."""
    loader = ElasticDataLoader(range(8), global_batch_size=4, shards=2)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with on_stage() as stage:
        stage.models = [model]
        with pytest.raises(SparkElasticError, match="models train with shards=2 in a TorchState only"):
            stage.begin(ObjectState(loader=loader, model=model))


def test_the_donor_is_a_rank_with_the_newest_commit() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        stage.begin(state, others=[CommitId(1, 5)], rank=0)
        assert state.donor == 1


def test_reports_carry_plain_numbers_and_the_step() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        state.commit()
        state.report(loss=torch.tensor(1.5), name="x", count=numpy.int64(3))
        assert stage.control.reported[-1] == Metrics({"step": 1, "loss": 1.5, "name": "x", "count": 3})
        with pytest.raises(TypeError, match="loss"):
            state.report(loss=[1])


def test_a_metric_named_step_is_left_out_with_a_warning() -> None:
    with on_stage() as stage:
        state = ObjectState()
        stage.begin(state)
        state.commit()
        with pytest.warns(UserWarning, match="the number of commits is reported as step") as told:
            state.report(step="3/8", loss=1.5)
        assert stage.control.reported[-1] == Metrics({"step": 1, "loss": 1.5})
    assert told[0].filename == __file__


def test_reported_values_become_plain_numbers() -> None:
    import numpy

    with on_stage() as stage:
        state = ObjectState(epoch=0)
        stage.begin(state)
        state.report(better=True, loss=numpy.float64(0.5), count=torch.tensor(3), huge=2**70)
        values = stage.control.reported[-1].values
        assert [type(values[name]) for name in ("better", "loss", "count", "huge")] == [int, float, int, float]


def test_outside_a_job_a_report_takes_what_it_takes_in_a_job() -> None:
    ObjectState().report(loss=torch.tensor(1.5), name="x")
    with pytest.raises(TypeError, match="takes numbers, one-element tensors and strings, not list"):
        ObjectState().report(loss=[1.0])
    with pytest.raises(TypeError, match=r"not Tensor of torch\.float32, torch\.strided, cpu, shape \[3\]"):
        ObjectState().report(loss=torch.ones(3))


@pytest.mark.parametrize("act", [ObjectState.commit, ObjectState.check_host_updates])
def test_outside_a_job_no_other_state_commits_while_the_elastic_function_runs(act: Any) -> None:
    other = ObjectState()

    @elastic
    def train(state: ObjectState) -> None:
        act(state)
        act(other)

    with pytest.raises(SparkElasticError, match="only the state that was given to the elastic function"):
        train(ObjectState())
    act(other)  # as it may above the elastic function
