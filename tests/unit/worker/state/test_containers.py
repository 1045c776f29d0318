"""Modules, optimizers and tensors in lists, tuples and dicts of a State: restored in place, never copied."""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
import pickle
import random
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy
import pytest
import torch
from worker_stage import on_stage

from spark_elastic.checkpoint.skeleton import StateDict
from spark_elastic.data import ElasticDataLoader
from spark_elastic.errors import SparkElasticError, TrainingCodeError
from spark_elastic.protocol.messages import CommitId
from spark_elastic.worker.state.snapshot import Found, flatten
from spark_elastic.worker.state.torch_state import TorchState


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


def make(commit: str = "copy") -> TorchState:
    torch.manual_seed(0)
    models = torch.nn.ModuleList([torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)])
    optimizers = {
        "all": [torch.optim.Adam(models[0].parameters(), lr=0.1)],
        "rest": (torch.optim.Adam(models[1].parameters(), lr=0.1),),
    }
    return TorchState(models=[models], optimizers=optimizers, log=[1], commit=commit)


def optimizers(state: TorchState) -> list[torch.optim.Optimizer]:
    return [state.optimizers["all"][0], state.optimizers["rest"][0]]


def step(state: TorchState) -> None:
    for optimizer, model in zip(optimizers(state), state.models[0], strict=True):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def values(state: TorchState) -> list[torch.Tensor]:
    moments = [entry["exp_avg"] for optimizer in optimizers(state) for entry in optimizer.state.values()]
    return [tensor.detach().clone() for tensor in [*state.models[0].parameters(), *moments]]


@pytest.mark.parametrize("commit", ["copy", "host"])
def test_after_a_restore_the_same_optimizers_step_the_same_models(commit: str) -> None:
    state = make(commit)
    step(state)
    state.commit()
    held, modules, owners = values(state), state.models[0], optimizers(state)
    step(state)
    state.restore()
    assert state.models[0] is modules
    assert all(one is other for one, other in zip(optimizers(state), owners, strict=True))
    assert all(map(torch.equal, values(state), held))
    step(state)
    assert not torch.equal(values(state)[0], held[0]), "the weights would stand still"


def test_containers_that_change_between_commits_travel_by_value_around_what_is_in_them() -> None:
    state = make()
    first = state.models[0]
    state.commit()
    state.log.append(2)
    state.models.insert(0, "something else")
    del state.optimizers["rest"]
    state.optimizers["new"] = 3
    state.restore()
    assert (state.log, len(state.models), sorted(state.optimizers)) == ([1], 1, ["all", "rest"])
    assert state.models[0] is first


def test_an_object_that_was_taken_out_of_the_state_after_the_commit_comes_back() -> None:
    state = make()
    state.ema = torch.nn.Linear(1, 1)
    ema = state.ema
    state.commit()
    state.ema = None
    state.restore()
    assert state.ema is ema


def test_in_place_optimizers_in_containers_are_watched_and_their_weights_not_copied() -> None:
    model = torch.nn.Linear(50, 50)
    state = TorchState(models=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], commit="in_place")
    state._begin(None)
    state.commit()
    assert sum(tensor.numel() for tensor in state._keeper.current.buffer.views) == 0
    model(torch.ones(1, 50)).sum().backward()
    state.optimizers[0].step()
    with pytest.raises(TrainingCodeError, match="exactly one optimizer step"):
        state.optimizers[0].step()


def test_tensors_in_containers_are_restored_in_place_where_they_fit() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = TorchState(parts={"w": weight, "grown": torch.ones(1)})
    state.commit()
    with torch.no_grad():
        weight.zero_()
    state.parts["grown"] = torch.ones(5)
    state.restore()
    assert state.parts["w"] is weight
    assert weight.tolist() == [1.0, 1.0]
    assert state.parts["grown"].tolist() == [1.0]


def test_a_newcomer_loads_into_what_it_has_at_the_same_places() -> None:
    donor = make()
    step(donor)
    with on_stage() as stage:
        state = make()
        mine = optimizers(state)
        objects: Any = {
            "models": [StateDict(donor.models[0].state_dict())],
            "optimizers": {
                "all": [StateDict(optimizers(donor)[0].state_dict())],
                "rest": (StateDict(optimizers(donor)[1].state_dict()),),
            },
            "log": [1, 2],
        }
        stage.arriving = {"steps": 4, "size": 1, "objects": objects}
        stage.begin(state, rank=1, others=[CommitId(3, 4)])
        assert all(map(torch.equal, values(state), values(donor)))
        assert all(one is other for one, other in zip(optimizers(state), mine, strict=True))
        assert state.log == [1, 2]


def test_a_newcomer_without_the_object_names_its_place() -> None:
    with on_stage() as stage:
        state = TorchState(models=[])
        objects = {"models": [StateDict(torch.nn.Linear(1, 1).state_dict())]}
        stage.arriving = {"steps": 4, "size": 1, "objects": objects}
        with pytest.raises(SparkElasticError, match=r"state.models\[0\] was saved with a state dict, but is NoneType"):
            stage.begin(state, rank=1, others=[CommitId(3, 4)])


class Holder:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_an_optimizer_in_an_object_that_would_be_copied_by_value_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="a Holder in the State holds the optimizer SGD"):
        TorchState(holder=Holder(optimizer)).commit()


class Progress:
    def __init__(self, loader: object) -> None:
        self.loader = loader


def test_a_loader_in_an_object_that_would_be_copied_by_value_is_refused() -> None:
    """On all ranks but the first, and after a reset, it would have been a copy that no training moves on."""
    loader = ElasticDataLoader(list(range(8)), global_batch_size=4)
    with pytest.raises(
        TypeError, match=r"a Progress in the State holds the loader ElasticDataLoader .* give the loader itself"
    ):
        TorchState(progress=Progress(loader), loader=loader).commit()


class Trainer:
    """An object that knows itself by its part, and by a method of its own."""

    def __init__(self) -> None:
        self.step = 0
        self.child = Progress(self)
        self.rate = self.present

    def present(self) -> int:
        return self.step


@pytest.mark.parametrize("arrives", [False, True], ids=["after a restore", "on a newcomer"])
def test_objects_that_refer_to_each_other_and_to_themselves_stay_together(arrives: bool) -> None:
    """References led to the copy in the commit: on newcomers from the first step on, and on all ranks after a reset."""
    trainer, donors = Trainer(), Trainer()
    warmup = Progress(trainer)
    with on_stage() as stage:
        state = TorchState(warmup=warmup, trainer=trainer, both={"first": warmup, "rest": [trainer]})
        if arrives:
            donors.step = 3
            objects = {"warmup": Progress(donors), "trainer": donors}
            objects["both"] = {"first": objects["warmup"], "rest": [donors]}
            found = Found()
            stage.arriving = {
                "steps": 4,
                "size": 1,
                "objects": pickle.loads(cloudpickle.dumps(flatten(objects, found))),
            }
            stage.begin(state, rank=1, others=[CommitId(3, 4)])
        else:
            trainer.step = 3
            stage.begin(state)
            trainer.step = 4
            trainer.child = warmup
            state.restore()
    assert state.trainer is trainer is warmup.loader is trainer.child.loader is state.both["rest"][0]
    assert state.warmup is warmup is state.both["first"] is not trainer.child
    trainer.step += 1
    assert trainer.rate() == trainer.step == 4


@pytest.mark.parametrize("arrives", [False, True], ids=["after a restore", "on a newcomer"])
def test_a_member_of_an_enum_is_that_of_the_enum_here(arrives: bool) -> None:
    """A function that defines an enum has another one on each rank."""

    def made() -> Any:
        class Phase(enum.IntEnum):
            WARM = 0  # false
            HOT = 2

        return Phase

    there, here = made(), made()
    with on_stage() as stage:
        state = TorchState(phase=here.WARM, others=[here.HOT], last=there.WARM)
        if arrives:
            objects = {"phase": there.HOT, "others": [there.WARM], "last": Kind.SECOND}
            stage.arriving = {"steps": 4, "size": 1, "objects": objects, "rebound": ["phase"]}
            stage.begin(state, rank=1, others=[CommitId(3, 4)])
            assert (state.phase, state.others, state.last) == (here.HOT, [here.WARM], Kind.SECOND)
        else:
            stage.begin(state)
            state.phase = there.HOT
            state.restore()
            assert (state.phase, state.others, state.last) == (here.WARM, [here.HOT], there.WARM)


@dataclasses.dataclass(frozen=True)
class Trial:
    rate: float


def test_objects_that_are_hashed_by_value_keep_their_hash() -> None:
    """One that was refilled while it was in a set could not be found there any more."""
    state = TorchState(tried=set(), current=Trial(0.1), best={})
    state.tried.add(state.current)
    state.best = {"of": state.current}
    state.commit()
    other = state.current = Trial(0.2)
    state.restore()
    assert state.current == Trial(0.1) in state.tried
    assert other == Trial(0.2)


@pytest.mark.parametrize("make", [deque, lambda: defaultdict(list)])
def test_a_container_that_its_own_entry_refers_to_stays_one(make: Callable[[], Any]) -> None:
    queue, entry = make(), Progress(None)
    entry.loader = queue
    if isinstance(queue, deque):
        queue.append(entry)
    else:
        queue["entries"].append(entry)
    state = TorchState(queue=queue)
    state.commit()
    state.restore()
    kept = state.queue[0] if isinstance(queue, deque) else state.queue["entries"][0]
    assert kept.loader is state.queue is queue


class Scratch:
    """Puts its state out in an array that another one uses, too."""

    def __init__(self, value: float, scratch: numpy.ndarray) -> None:
        self.value, self.scratch = value, scratch

    def state_dict(self) -> dict[str, Any]:
        self.scratch[:] = self.value
        return {"value": self.scratch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"][0])


def test_state_dicts_may_use_one_array_after_each_other() -> None:
    scratch = numpy.zeros(1)
    one, other = Scratch(1.0, scratch), Scratch(2.0, scratch)
    state = TorchState(one=one, other=other)
    state.commit()
    one.value = other.value = 0.0
    state.restore()
    assert (one.value, other.value) == (1.0, 2.0)


def test_what_a_restore_gives_is_not_what_the_commit_keeps() -> None:
    state = TorchState(table={"rows": numpy.zeros(2)}, holder=Holder([1]))  # type: ignore[arg-type]
    state.commit()
    for _ in range(2):
        state.restore()
        assert (state.table["rows"].tolist(), state.holder.optimizer) == ([0, 0], [1])
        state.table["rows"] += 1
        state.holder.optimizer.append(2)


class Average:
    def __init__(self) -> None:
        self.shadow = torch.zeros(1)
        self.log: list[int] = []

    def update(self) -> None:
        self.shadow = self.shadow + 1
        self.log.append(1)


@pytest.mark.parametrize(
    "make", [lambda rate: {"rate": rate}, lambda rate: [rate], Average, lambda rate: torch.tensor([rate])]
)
def test_an_attribute_that_was_set_to_another_object_goes_back_to_its_own(make: Callable[..., Any]) -> None:
    """A table of stages: a reset put the content of the one stage into the other, for good."""
    stages = [make(0.1), make(0.2)] if make is not Average else [Average(), Average()]
    if make is Average:
        stages[1].log.append(1)
    before = copy.deepcopy(stages)
    state = TorchState(stage=stages[0])
    for stage in (stages[1], stages[0]):
        state.commit()
        kept, state.stage = state.stage, stage
        state.restore()
        assert state.stage is kept
        state.stage = stage
    assert list(map(dump, stages)) == list(map(dump, before))


@pytest.mark.parametrize("kept_in", [dict, list])
def test_an_entry_that_was_set_to_another_object_goes_back_to_its_own(kept_in: type) -> None:
    stages: list[Any] = [[1], {"rate": 2}, Average(), torch.ones(2), numpy.ones(2)]
    before = [dump(stage) for stage in stages]
    state = TorchState(outer=kept_in([(0, stages[0])]) if kept_in is dict else [stages[0]])
    for kept, other in itertools.permutations(stages, 2):
        state.outer[0] = kept
        state.commit()
        state.outer[0] = other
        state.restore()
        assert state.outer[0] is kept
    assert [dump(stage) for stage in stages] == before


def test_what_is_in_two_places_is_one_again_after_it_was_not() -> None:
    shared: list[int] = [1]
    model = torch.nn.Linear(1, 1)
    state = TorchState(first=shared, second={"of": shared}, models=[model, torch.nn.Linear(1, 1)], current=model)
    state.commit()
    state.second["of"] = [3]
    shared.append(2)
    state.current = state.models[1]
    state.restore()
    assert state.first is state.second["of"] is shared
    assert (shared, state.current) == ([1], model)


def test_a_model_that_newcomers_have_in_another_place_already_need_not_be_made() -> None:
    with on_stage() as stage:
        models = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
        state = TorchState(models=models, current=models[0])
        state._prepare()
        stage.begin(state)
        state.current = models[1]
        state.latest = models[0]
        state.commit()
        sent = {**state._keeper.current.skeleton, "objects": state._keeper.current.content()["objects"]}
    with on_stage() as stage:
        mine = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
        state = TorchState(models=mine, current=mine[0])
        stage.arriving = sent
        stage.begin(state, rank=1, others=[CommitId(3, 4)])
        assert state.current is mine[1] is state.models[1]
        assert state.latest is mine[0] is state.models[0]
        for one, other in zip(mine, models, strict=True):
            assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_an_object_that_was_in_two_places_when_the_job_began_cannot_become_two() -> None:
    """A newcomer loaded both into its one model."""
    with on_stage() as stage:
        model = torch.nn.Linear(1, 1)
        state = TorchState(model=model, average=model)
        state._prepare()
        stage.begin(state)
        state.average = copy.deepcopy(model)
        with pytest.raises(TrainingCodeError, match=r"state\.model and state\.average were one object when"):
            state.commit()
    objects = {"model": StateDict(model.state_dict()), "average": StateDict(model.state_dict())}
    with on_stage() as stage:
        state = TorchState(model=model, average=model)
        stage.arriving = {"steps": 4, "size": 1, "objects": objects}
        with pytest.raises(SparkElasticError, match=r"state\.average is an object that the State has in another place"):
            stage.begin(state, rank=1, others=[CommitId(3, 4)])


@pytest.mark.parametrize("first", [{"rate": 0.0}, None])
def test_a_rank_that_is_one_commit_behind_leaves_other_entries_of_a_table_alone(first: Any) -> None:
    """What belonged to the next stage went into the one that this rank had still been at."""
    stages, log = [{"rate": 0.1}, {"rate": 0.2}], [1]
    with on_stage() as stage:
        state = TorchState(config={"stage": stages[0] if first else None}, log=log)
        state._prepare()
        stage.begin(state)
        state.config["stage"] = stages[1]
        state.commit()
        state.restore()
        objects = {"config": {"stage": {"rate": 0.1}}, "log": [1, 2]}
        stage.arriving = {"steps": 4, "size": 1, "objects": objects}
        stage.begin(state, rank=1, others=[CommitId(3, 4)])
    assert stages == [{"rate": 0.1}, {"rate": 0.2}]
    assert state.config == objects["config"]
    assert (state.config["stage"] is stages[0]) == bool(first)
    assert state.log is log == [1, 2]


@pytest.mark.parametrize("table_first", [False, True])
def test_what_points_into_a_list_may_point_to_another_entry(table_first: bool) -> None:
    def made(models: list[torch.nn.Module], table: list[list[int]]) -> TorchState:
        pointers, lists = {"model": models[0], "current": table[0]}, {"models": models, "table": table}
        return TorchState(**({**lists, **pointers} if table_first else {**pointers, **lists}))

    def some() -> tuple[list[torch.nn.Module], list[list[int]]]:
        return [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], [[0], [1]]

    models, table = some()
    with on_stage() as stage:
        state = made(models, table)
        state._prepare()
        stage.begin(state)
        state.model, state.current = models[1], table[1]
        table[1].append(2)
        state.commit()
        sent = {**state._keeper.current.skeleton, "objects": state._keeper.current.content()["objects"]}
    with on_stage() as stage:
        mine, my_table = some()
        state = made(mine, my_table)
        stage.arriving = pickle.loads(cloudpickle.dumps(sent))
        stage.begin(state, rank=1, others=[CommitId(3, 4)])
        assert state.models is mine
        assert state.table is my_table == [[0], [1, 2]]
        assert (state.model, state.current) == (mine[1], my_table[1])
        assert state.current is my_table[1]
        for one, other in zip(mine, models, strict=True):
            assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_attributes_have_one_order_on_all_ranks() -> None:
    """Commits in slices go by it, and after a loss some tensors had the content of others."""
    with on_stage() as stage:
        state = TorchState(a=torch.zeros(1), b=torch.ones(1))
        stage.begin(state)
        a = state.a
        del state.a
        state.a = a
        state.commit()
        sent = {**state._keeper.current.skeleton, "objects": state._keeper.current.content()["objects"]}
        del state.b
        state.restore()
        order = list(state._values(shared=True))
    with on_stage() as stage:
        state = TorchState(a=torch.zeros(1), b=torch.zeros(1))
        stage.arriving = sent
        stage.begin(state, rank=1, others=[CommitId(3, 4)])
        assert list(state._values(shared=True)) == order
        assert (order[-2:], state.b.item()) == (["b", "a"], 1.0)


def test_an_optimizer_of_this_rank_alone_goes_back_to_its_groups() -> None:
    one, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([one], lr=0.1)
    state = TorchState(local={"optimizer": optimizer})
    state.commit()
    optimizer.add_param_group({"params": [other]})
    state.restore()
    assert [group["params"] for group in optimizer.param_groups] == [[one]]


@pytest.mark.parametrize("name", ["sync", "restore", "commit", "report"])
def test_an_object_cannot_hide_a_method(name: str) -> None:
    """The next loss ended in the error that a bool cannot be called."""
    state = TorchState(epoch=0)
    with pytest.raises(
        ValueError, match=f"'{name}' cannot be the name of an object of a TorchState, which has it as a method"
    ):
        setattr(state, name, True)


def test_large_tensors_and_arrays_are_not_kept_alive() -> None:
    state = TorchState(large=torch.ones(3), rows=[numpy.ones(3)], teacher=torch.nn.Linear(1, 1))
    teacher = weakref.ref(state.teacher)
    with on_stage() as stage:
        stage.begin(state)
        state.commit()
        state.teacher = None
        state.commit()
        state.commit()
        gone = [weakref.ref(state.large), weakref.ref(state.rows[0]), teacher]
        state.large, state.rows[0] = torch.zeros(3), numpy.zeros(3)
        assert [reference() for reference in gone] == [None] * 3
        state.restore()
        assert (state.large.tolist(), state.rows[0].tolist()) == ([1] * 3, [1] * 3)


def test_an_attribute_of_this_rank_alone_goes_back_to_its_own_object() -> None:
    seen: list[int] = []
    state = TorchState(local={"objects": [1, 2], "seen": seen})
    state.commit()
    state.seen = [9]
    state.restore()
    assert (state.objects, state.seen) == ([1, 2], [])
    assert state.seen is seen


def dump(value: Any) -> str:
    return repr(vars(value) if isinstance(value, Average) else value)


def test_a_newcomers_object_does_not_take_in_what_belongs_to_another_one() -> None:
    with on_stage() as stage:
        stages = [{"rate": 0.1}, {"rate": 0.2}]
        donor = TorchState(stage=stages[0], config={"stage": stages[0]}, both=(stages[0], {}), log=[])
        donor._prepare()
        stage.begin(donor)
        donor.stage = donor.config["stage"] = stages[1]
        donor.both = (stages[0], stages[1])
        donor.log.append(1)
        donor.commit()
        sent = pickle.loads(cloudpickle.dumps(donor._keeper.current.skeleton))
    with on_stage() as stage:
        mine, log, config = [{"rate": 0.1}, {"rate": 0.2}], [], {}
        config["stage"] = mine[0]
        state = TorchState(stage=mine[0], config=config, both=(mine[0], {}), log=log)
        stage.arriving = sent
        stage.begin(state, rank=1, others=[CommitId(3, 4)])
        assert (state.stage, mine, state.log) == ({"rate": 0.2}, [{"rate": 0.1}, {"rate": 0.2}], [1])
        assert (state.log, state.config, state.both[0]) == (log, config, mine[0])
        assert state.log is log
        assert state.config is config
        assert state.both[0] is mine[0]
        assert state.stage is state.config["stage"] is state.both[1]


@pytest.mark.parametrize("wrap", [lambda function: function, lambda function: [function], Holder])
def test_a_function_that_would_travel_with_a_model_is_refused(wrap: Callable[[Any], Any]) -> None:
    """On other ranks it got a copy of the model, and its gradients went nowhere."""
    net = torch.nn.Linear(1, 1)

    def by_default(net: torch.nn.Module = net) -> Any:
        return net

    for function in (lambda: net.weight.sum(), by_default):
        with pytest.raises(TypeError, match=r"a function in the State, .*, uses a Linear, and other ranks would get"):
            TorchState(penalty=wrap(function)).commit()
    rate, teacher, criterion = 0.1, torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.CrossEntropyLoss()
    TorchState(rate=wrap(lambda: rate), activation=wrap(torch.nn.functional.relu)).commit()
    TorchState(soft=wrap(lambda x: criterion(x, teacher(x))), kind=torch.nn.Linear).commit()


TRAINED = torch.nn.Linear(1, 1)


def test_a_global_of_the_functions_own_script_counts_where_the_function_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outer() -> Any:
        return (lambda: TRAINED.weight)()

    def key(row: Any) -> Any:
        return row.TRAINED

    for function in (outer, key):
        monkeypatch.setattr(function, "__module__", "__main__")
    TorchState(key=key).commit()
    with pytest.raises(TypeError, match=r"outer, uses a Linear"):
        TorchState(penalty=outer).commit()


class Clipper:
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters


def test_a_parameter_of_the_states_module_in_an_object_that_would_be_copied_by_value_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="a Clipper in the State holds bias, a parameter of a module of the State"):
        TorchState(clipper=Clipper(list(model.parameters())), model=model).commit()
    TorchState(average=Clipper([torch.nn.Parameter(torch.ones(1))]), model=model).commit()


def held() -> dict[str, Any]:
    return {
        "average": Average(),
        "log": [0],
        "counts": Counter(a=1),
        "latest": deque([1], maxlen=2),
        "seen": {1},
        "grid": numpy.zeros(2),
        "nested": {"logs": [[1]], ("any", object): 1},
    }


def change(objects: dict[str, Any]) -> None:
    objects["average"].update()
    for name in ("log", "latest"):
        objects[name].append(2)
    objects["counts"]["a"] += 1
    objects["seen"].add(2)
    objects["grid"] += 1
    objects["nested"]["logs"].append([2])
    objects["nested"]["new"] = 2


def shown(objects: dict[str, Any]) -> str:
    return repr({**objects, "average": (objects["average"].shadow, objects["average"].log)})


def test_user_code_may_go_on_with_the_objects_that_it_gave_to_the_state() -> None:
    mine, once, twice = held(), held(), held()
    change(once)
    change(twice)
    change(twice)
    state = TorchState(**mine)
    change(mine)
    state.commit()
    for _ in range(2):  # what was restored is not what is kept
        change(mine)
        state.restore()
        assert all(getattr(state, name) is value for name, value in mine.items())
        assert shown(mine) == shown(once)
    change(mine)
    assert shown(mine) == shown(twice)


def test_a_newcomer_may_go_on_with_the_objects_that_it_gave_to_the_state() -> None:
    donor = TorchState(**held())
    change(vars(donor))
    donor.commit()
    mine = held()
    newcomer = TorchState(**mine)
    newcomer._load(copy.deepcopy(donor._lend().lend().content()["objects"]))
    assert all(getattr(newcomer, name) is value for name, value in mine.items())
    assert shown(mine) == shown({name: getattr(donor, name) for name in mine})


def test_an_object_that_has_come_to_two_places_since_the_commit_is_restored_as_two() -> None:
    state = TorchState(first=Average(), second=Average(), logs=[[1], [2]], best=torch.zeros(1), present=torch.ones(1))
    state.first.update()
    state.commit()
    state.second, state.logs[0], state.best = state.first, state.logs[1], state.present
    state.restore()
    assert (state.first.log, state.second.log, state.logs) == ([1], [], [[1], [2]])
    assert (state.best, state.present) == (torch.zeros(1), torch.ones(1))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def test_what_is_not_all_in_its_dict_is_replaced() -> None:
    state = TorchState(size=Slotted(1), random=random.Random(1), kind=Kind.FIRST, latest=deque([1], maxlen=1))
    expected = random.Random(1).random()
    state.commit()
    state.size.value = 2
    state.random.random()
    state.kind = Kind.SECOND
    state.latest = deque([1, 2])
    state.restore()
    assert (state.size.value, state.random.random(), state.kind, state.latest) == (
        1,
        expected,
        Kind.FIRST,
        deque([1], 1),
    )


def test_an_array_that_cannot_be_written_to_is_replaced() -> None:
    state = TorchState(weights=numpy.ones(3))
    state.weights.flags.writeable = False
    state.commit()
    state.restore()
    assert state.weights.tolist() == [1.0, 1.0, 1.0]
