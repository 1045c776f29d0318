"""What would train wrongly without a word is an error with the line to write; what is meant goes on in silence."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler
from worker_stage import Stage, on_stage

from spark_elastic.data import ElasticDataLoader
from spark_elastic.data.deliveries import deliveries
from spark_elastic.errors import TrainingCodeError
from spark_elastic.worker.checks import plain_loaders, training_code
from spark_elastic.worker.checks.manual_averaging import reductions
from spark_elastic.worker.checks.same_inputs import same_inputs
from spark_elastic.worker.collectives import allreduce
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.state.torch_state import TorchState


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage() as stage, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield stage


def told(warned: Iterable[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    """What users are told. The interpreter has warnings of its own, such as that a process with threads has forked."""
    return [each for each in warned if issubclass(each.category, UserWarning)]


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(3, 2)).sum().backward()


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


class Counting(torch.nn.Linear):
    def __init__(self, persistent: bool) -> None:
        super().__init__(2, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_training_changes_and_commits_leave_out_is_warned_of(stage: Stage, persistent: bool) -> None:
    model = DistributedDataParallel(Counting(persistent))
    optimizer = sgd(model)
    stage.begin(TorchState(model=model, optimizer=optimizer))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(8):
            step(model, optimizer)
    texts = [str(each.message) for each in told(warned)]
    wanted = (
        [] if persistent else ["the buffer state.model.module.calls changes while it trains, and commits leave it out"]
    )
    assert [text.partition(" (")[0] for text in texts] == wanted


class Called(torch.nn.Sequential):
    calls = 0

    def forward(self, input: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(input)


class Warming(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


def test_attributes_that_training_carries_on_and_commits_leave_out_are_warned_of_once(stage: Stage) -> None:
    model = DistributedDataParallel(Called(net()))
    sgd(model)  # from now on, torch's hooks also see the step of the base class
    optimizer = Warming(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            stage.begin(state)
            for _ in range(8):
                step(model, optimizer)
    assert [str(each.message).partition(" changes")[0] for each in told(warned)] == [
        "the attribute state.model.module.calls",
        "the attribute state.optimizer.calls",
    ]


# ---------------------------------------------------------------- models


def test_a_module_in_the_state_that_trains_and_is_not_wrapped_is_refused_at_the_first_step(stage: Stage) -> None:
    model = net()
    state = TorchState(net=model, optimizer=sgd(model))
    stage.begin(state)
    with pytest.raises(
        TrainingCodeError, match=r"state\.net\.weight .* Write net = se\.DistributedDataParallel\(net\)"
    ):
        step(model, state.optimizer)


@pytest.mark.parametrize(
    ("models", "place"),
    [(lambda model: {"a": {"b c": model}}, "models['a']['b c']"), (lambda model: [net(), model], "models[1]")],
)
def test_a_module_in_a_container_that_is_not_wrapped_is_named_by_its_place(
    stage: Stage, models: Any, place: str
) -> None:
    model = net()
    state = TorchState(models=models(model), optimizer=sgd(model))
    stage.begin(state)
    with pytest.raises(TrainingCodeError) as caught:
        step(model, state.optimizer)
    assert f"Write {place} = se.DistributedDataParallel({place}) above" in str(caught.value)
    assert 'se.TorchState(local={"models": models})' in str(caught.value)


def test_a_model_of_which_the_state_knows_nothing_is_refused_where_nothing_is_wrapped(stage: Stage) -> None:
    model = net()
    stage.begin(TorchState(epoch=0))
    with pytest.raises(TrainingCodeError, match=r"model = se\.DistributedDataParallel\(model\)"):
        step(model, sgd(model))


def reduce_by_hand(model: torch.nn.Module, way: str) -> None:
    """Average gradients over the ranks, each by itself or all in one tensor."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if way == "each":
        for gradient in gradients:
            gradient.copy_(allreduce(gradient))
    elif way == "one tensor":
        allreduce(torch.cat([gradient.flatten() for gradient in gradients]))
    elif way == "torch's own":
        reductions.note(sum(gradient.numel() for gradient in gradients))  # as a watched group does


@pytest.mark.parametrize("way", ["each", "one tensor", "torch's own"])
def test_gradients_that_are_averaged_by_hand_need_no_wrapper(stage: Stage, way: str) -> None:
    model = net()
    state = TorchState(net=model, optimizer=sgd(model))
    stage.begin(state)
    for _ in range(2):
        state.optimizer.zero_grad()
        backward(model)
        reduce_by_hand(model, way)
        state.optimizer.step()


def test_a_reduction_of_something_else_is_no_average_of_gradients(stage: Stage) -> None:
    model = net()
    state = TorchState(net=model, optimizer=sgd(model))
    stage.begin(state)
    backward(model)
    allreduce(torch.zeros(2))
    with pytest.raises(TrainingCodeError, match=r"state\.net\.weight trains"):
        state.optimizer.step()


def test_outside_a_job_a_bare_model_trains(stage: Stage) -> None:
    model = net()
    state = TorchState(model=model, optimizer=sgd(model))
    stage.begin(TorchState(epoch=0))
    stage.finished = True
    step(model, state.optimizer)


def test_averages_and_teachers_that_no_optimizer_steps_are_left_alone(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    state = TorchState(model=model, optimizer=sgd(model), ema=copy.deepcopy(model.module), teacher=[net()])
    stage.begin(state)
    for _ in range(3):
        step(model, state.optimizer)
        state.commit()


def test_what_is_each_ranks_own_trains_as_it_likes(stage: Stage) -> None:
    model, probe = DistributedDataParallel(net()), net()
    state = TorchState(model=model, optimizer=sgd(model), local={"probe": probe, "probes": [sgd(probe)]})
    stage.begin(state)
    step(model, state.optimizer)
    step(probe, state.probes[0])
    step(probe, sgd(probe))


def test_a_copy_that_learns_in_an_inner_loop_and_an_input_that_is_optimized_are_the_users_business(
    stage: Stage,
) -> None:
    model = DistributedDataParallel(net())
    state = TorchState(model=model, optimizer=sgd(model))
    stage.begin(state)
    learner = copy.deepcopy(model.module)
    step(learner, sgd(learner))
    noise = torch.zeros(3, 2, requires_grad=True)
    model(noise).sum().backward()
    torch.optim.SGD([noise], lr=0.1).step()


def test_a_wrapper_of_torch_that_is_still_being_made_averages_nothing(stage: Stage) -> None:
    module = net()
    optimizer = sgd(module)
    stage.begin(TorchState(model=module, optimizer=optimizer))
    begun = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(TrainingCodeError, match=r"Write model = se\.DistributedDataParallel"):
        step(module, optimizer)
    del begun


def test_a_state_that_holds_the_inner_module_of_a_wrapped_one_is_right(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    state = TorchState(model=model.module, optimizer=sgd(model))
    stage.begin(state)
    step(model, state.optimizer)


# ---------------------------------------------------------------- optimizers, scalers, schedulers


class Holder:
    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["inner"])


@pytest.mark.parametrize("place", ["nowhere", "attribute", "list", "holder", "local"])
def test_an_optimizer_of_a_wrapped_model_has_to_be_in_the_state_somehow(stage: Stage, place: str) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    held: dict[str, Any] = {
        "nowhere": {},
        "attribute": {"sgd": optimizer},
        "list": {"optimizers": [{"a": optimizer}]},
        "holder": {"holder": Holder(optimizer)},
        "local": {"local": {"sgd": optimizer}},
    }[place]
    stage.begin(TorchState(model=model, **held))
    if place == "nowhere":
        with pytest.raises(TrainingCodeError, match=r"se\.TorchState\(…, optimizer=optimizer\)"):
            step(model, optimizer)
    else:
        step(model, optimizer)


class Around(torch.optim.Optimizer):
    """An optimizer that lets another one step, as Lookahead does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_an_optimizer_within_another_one_has_to_be_in_the_state_too(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    around = Around(sgd(model))
    stage.begin(TorchState(model=model, optimizer=around))
    backward(model)
    with pytest.raises(
        TrainingCodeError, match=r"\(SGD\), which is the one within the State's Around, .* optimizer_2=opt"
    ):
        around.step()


def test_a_scheduler_in_the_state_does_not_stand_for_its_optimizer(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    stage.begin(TorchState(model=model, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1)))
    with pytest.raises(TrainingCodeError, match=r"an optimizer \(SGD\) steps the parameters"):
        step(model, optimizer)


def test_a_scheduler_outside_the_state_is_one_warning(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model=model, optimizer=optimizer)
    stage.begin(state)
    with pytest.warns(UserWarning, match="scheduler=scheduler") as warned:
        step(model, optimizer)
    assert warned[0].filename == __file__
    step(model, optimizer)
    state.scheduler = scheduler
    stage.begin(state)
    step(model, optimizer)


class WithPause(torch.optim.lr_scheduler.LRScheduler):
    """One of a user's own around another one, which does without the base class's attributes."""

    def __init__(self, inner: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_a_scheduler_in_the_state_need_not_say_which_optimizer_it_has(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    scheduler = WithPause(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    stage.begin(TorchState(model=model, optimizer=optimizer, scheduler=scheduler))
    step(model, optimizer)


def test_a_scaler_outside_the_state_is_refused(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    scaler = torch.amp.GradScaler("cpu")
    state = TorchState(model=model, optimizer=sgd(model))
    stage.begin(state)
    scaler.scale(model(torch.ones(3, 2)).sum()).backward()
    with pytest.raises(TrainingCodeError, match="scaler=scaler"):
        scaler.step(state.optimizer)


# ---------------------------------------------------------------- commits


def making(**objects: Any) -> tuple[Any, TorchState]:
    model = DistributedDataParallel(net())
    return model, TorchState(model=model, optimizer=sgd(model), **objects)


def test_a_commit_between_backward_and_step_is_refused(stage: Stage) -> None:
    model, state = making()
    stage.begin(state)
    backward(model)
    with pytest.raises(TrainingCodeError, match=r"state\.commit\(\) after optimizer\.step\(\)"):
        state.commit()
    state.optimizer.step()
    state.commit()
    with model.no_sync():
        backward(model)
    with pytest.raises(TrainingCodeError):
        state.commit()


def test_gradients_that_stay_set_after_a_step_are_no_pending_ones(stage: Stage) -> None:
    model, state = making()
    stage.begin(state)
    for _ in range(3):
        step(model, state.optimizer)
        state.commit()


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_were_dropped_are_no_pending_ones(stage: Stage, to_none: bool) -> None:
    model, state = making()
    stage.begin(state)
    backward(model)
    state.optimizer.zero_grad(set_to_none=to_none)
    state.commit()


def test_a_step_that_a_scaler_skips_is_no_pending_one(stage: Stage) -> None:
    scaler = torch.amp.GradScaler("cpu")
    model, state = making(scaler=scaler)
    stage.begin(state)
    (scaler.scale(model(torch.ones(3, 2)).sum()) * float("inf")).backward()
    scaler.step(state.optimizer)
    scaler.update()
    state.commit()


def test_gradients_that_another_models_loss_leaves_behind_are_no_pending_ones(stage: Stage) -> None:
    """Of a GAN's two optimizers each leaves gradients in the other's model."""
    generator, critic = DistributedDataParallel(torch.nn.Linear(2, 2)), DistributedDataParallel(net())
    state = TorchState(generator=generator, critic=critic, optimizers=[sgd(generator), sgd(critic)])
    stage.begin(state)
    for _ in range(2):
        step(critic, state.optimizers[1])
        state.optimizers[0].zero_grad()
        critic(generator(torch.ones(3, 2))).sum().backward()
        state.optimizers[0].step()
        state.commit()


def test_gradients_of_a_closure_are_no_pending_ones(stage: Stage) -> None:
    model = DistributedDataParallel(net())
    state = TorchState(model=model, optimizer=torch.optim.LBFGS(model.parameters(), max_iter=2))
    stage.begin(state)

    def closure() -> Any:
        state.optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss.detach()

    state.optimizer.step(closure)
    state.commit()


@pytest.mark.parametrize("steps", [3, 5])
def test_a_function_that_steps_and_never_commits_is_warned_of_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(training_code, "STEPS_WITHOUT_COMMIT", 4)
    model, state = making()
    stage.begin(state)

    def train() -> None:
        for _ in range(steps):
            step(model, state.optimizer)
        if steps < 4:
            state._leave(stage.world)

    with pytest.warns(UserWarning, match=r"Write state\.commit\(\)") as warned:
        train()
    assert len(told(warned)) == 1


def test_a_function_that_only_evaluates_returns_without_a_word(stage: Stage) -> None:
    model, state = making()
    stage.begin(state)
    with torch.no_grad():
        model(torch.ones(3, 2))
    state._leave(stage.world)


def test_after_the_elastic_function_nothing_in_torch_is_watched(stage: Stage) -> None:
    _, state = making()
    stage.begin(state)
    assert training_code._hooks
    state._leave(stage.world)
    assert not training_code._hooks


# ---------------------------------------------------------------- loaders


@pytest.fixture
def loader() -> ElasticDataLoader:
    return ElasticDataLoader([torch.ones(2)] * 16, global_batch_size=4)


def test_a_loader_outside_the_state_that_trains_is_warned_of_once(stage: Stage, loader: ElasticDataLoader) -> None:
    model, state = making()
    stage.begin(state)

    def train() -> None:
        for _ in loader:
            step(model, state.optimizer)
            state.commit()

    with pytest.warns(UserWarning, match=r"loader=loader") as warned:
        train()
    (warning,) = told(warned)
    assert warning.filename == __file__


def test_a_loader_outside_the_state_that_validates_is_not_warned_of(stage: Stage, loader: ElasticDataLoader) -> None:
    model, state = making()
    stage.begin(state)
    for _ in range(3):
        step(model, state.optimizer)
        state.commit()
        for batch in loader:
            model(batch)


def plain(**settings: Any) -> DataLoader[Any]:
    return DataLoader([torch.ones(2)] * 24, batch_size=4, **settings)  # type: ignore[arg-type]


def train_through(
    stage: Stage,
    loader: Any,
    validation: Any = (),
    rows: Sequence[int] = (),
    beside: Iterable[Any] = (),
    **kept: Any,
) -> None:
    """One rank of two trains through a loader, and validates after each step, also with one batch from ``beside``.

    What the model is given is known to have so many ``rows``.
    """
    model, state = making(**kept)
    model._here.rows_given = set(rows)
    moving = iter(beside)
    stage.peers = lambda mine: [list(mine)] * 2
    state._prepare()
    stage.begin(state, others=[None])
    for batch in loader() if callable(loader) else loader:
        state.optimizer.zero_grad()
        model(batch).sum().backward()
        state.optimizer.step()
        state.commit()
        for seen in itertools.chain(validation, itertools.islice(moving, 1)):
            with torch.no_grad():
                model(seen)


@pytest.mark.parametrize("settings", [{}, {"shuffle": True}, {"num_workers": 1}], ids=str)
def test_a_torch_loader_that_gives_all_rows_to_every_rank_and_trains_is_warned_of_once(
    stage: Stage, settings: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=r"se\.data\.ElasticDataLoader\(dataset") as warned:
        train_through(stage, plain(**settings))
    (warning,) = told(warned)
    assert warning.filename == __file__


@pytest.mark.parametrize("above", [False, True])
def test_ranks_that_train_with_the_same_inputs_are_warned_of_once(stage: Stage, above: bool) -> None:
    loader = plain() if above else [torch.ones(4, 2)] * 6  # of one from above is warned, too

    def given() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(loader):
            same_inputs.note([batch * number])
            yield batch

    with pytest.warns(UserWarning, match="each row (would )?count(s)? once per rank") as warned:
        train_through(stage, given())
    assert len(told(warned)) == 1
    assert "divide the rows by se.rank()" in str(warned[0].message) or above


class Rows(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2)] * 24)


ROWS: Any = [torch.ones(2)] * 24


@pytest.mark.parametrize(
    ("loader", "validation", "kept"),
    [
        ([torch.ones(4, 2)] * 8, plain(), {}),
        (DataLoader(ROWS, batch_size=4, sampler=DistributedSampler(ROWS, num_replicas=2, rank=0)), (), {}),
        (DataLoader(ROWS, batch_sampler=[[0, 2]] * 8), (), {}),
        (DataLoader(Rows(), batch_size=4), (), {}),
        (plain(sampler=RandomSampler(ROWS, replacement=True)), (), {}),
        (plain(), (), {"labelled": [ElasticDataLoader(ROWS, global_batch_size=4)]}),
        (plain, (), {}),
    ],
    ids=[
        "validates",
        "has a sampler",
        "has a batch sampler",
        "is iterable",
        "draws",
        "is beside one in the State",
        "is made within",
    ],
)
def test_a_torch_loader_that_validates_or_may_know_of_ranks_is_not_warned_of(
    stage: Stage, loader: Any, validation: Any, kept: dict[str, Any]
) -> None:
    train_through(stage, loader, validation, **kept)


@pytest.mark.parametrize(("epochs", "batch_size"), [(1, 2), (3, 4)])
def test_a_torch_loader_that_gives_a_batch_per_step_while_another_moves_along_is_not_warned_of(
    stage: Stage, epochs: int, batch_size: int
) -> None:
    above = plain()
    divided = DataLoader(ROWS, batch_size=batch_size, sampler=DistributedSampler(ROWS, num_replicas=2, rank=0))
    train_through(stage, itertools.chain.from_iterable(divided for _ in range(epochs)), beside=above)


@pytest.mark.parametrize(("rows", "is_warned_of"), [([2], False), ([2, 4], True)])
def test_rows_that_were_cut_out_of_each_batch_are_not_warned_of_but_whole_batches_are(
    stage: Stage, rows: list[int], is_warned_of: bool
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train_through(stage, plain(), rows=rows)
    assert len(told(warned)) == is_warned_of


@pytest.mark.parametrize("has_loader", [False, True])
def test_a_step_does_not_go_through_the_parameters_of_a_model_once_its_first_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, has_loader: bool
) -> None:
    above = [plain()] if has_loader else []
    monkeypatch.setattr(plain_loaders, "gc", SimpleNamespace(get_objects=lambda: list(above)))
    model, state = making()
    state._prepare()
    stage.begin(state, others=[None])
    step(model, state.optimizer)
    asked: list[Any] = []
    monkeypatch.setattr(model, "parameters", lambda: asked.append("parameters") or iter(()))
    for _ in range(plain_loaders.LAST_STEP):
        step(model, state.optimizer)
    assert asked == []
    assert state._checks is not None
    assert state._checks._plain_loaders is None, "the steps after these cost nothing"


@pytest.mark.parametrize("commits_first", [True, False])
def test_a_batch_that_trains_after_the_commit_that_counted_it_is_warned_of_once(
    stage: Stage, commits_first: bool
) -> None:
    model, state = making()
    stage.begin(state)
    loader, warned = object(), []
    for _ in range(3):
        batch = torch.ones(2, 2)
        deliveries.note(loader, batch, (2, 2), 0)
        if commits_first:
            state.commit()
        deliveries.find([batch])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(model, state.optimizer)
        warned += [str(warning.message) for warning in seen]
        state.commit()
        deliveries.find([batch])  # more losses of the same batch
    deliveries.forget(loader)
    assert [text[:42] for text in warned] == ["a batch was fetched before a commit and tr"] * commits_first


@pytest.mark.parametrize("commits", [True, False])
def test_steps_on_a_batch_after_the_commit_that_counted_it_are_warned_of_once(stage: Stage, commits: bool) -> None:
    """A reset skipped the rest of them without a word."""
    model, state = making()
    stage.begin(state)
    loader = object()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            batch = torch.ones(2, 2)
            deliveries.note(loader, batch, (2, 2), 0)
            for _ in range(3):
                deliveries.find([batch])
                deliveries.find([batch])
                step(model, state.optimizer)
                if commits:
                    state.commit()
            state.commit()
    deliveries.forget(loader)
    assert [str(warning.message)[:46] for warning in seen] == [
        "a batch that a commit has counted as processed"
    ] * commits
