"""The loop over parts in one process: what it leaves behind, how it ends, and what it refuses."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from one_rank_shards import Rows, first, run, training
from torch import nn
from worker_stage import on_stage

import spark_elastic as se
from spark_elastic.data import kernels
from spark_elastic.data.shards import Cut
from spark_elastic.errors import SparkElasticError, TrainingCodeError
from spark_elastic.worker.shards.parts import divided


def gradient(state: se.TorchState) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in state.model.parameters()])


def test_the_gradient_is_that_of_the_mean_over_all_rows_where_shards_do_not_matter() -> None:
    state = training(nn.Linear(4, 2), rows=22)
    batch = list(first(state))
    assert [len(x) for x, _ in batch] == [5, 6, 5, 6]
    parts = run(state, batch)
    mine = gradient(state)
    state.model.module.zero_grad()
    whole = state.model.module(torch.cat([x for x, _ in batch])).square().mean()
    whole.backward()
    assert torch.allclose(mine, gradient(state), rtol=1e-5)
    assert parts.means["loss"] == pytest.approx(whole.item(), rel=1e-5)


def test_gradients_of_several_batches_accumulate() -> None:
    state = training(nn.Linear(4, 2))
    batch = first(state)
    run(state, batch)
    once = gradient(state)
    run(state, batch)
    assert torch.equal(gradient(state), once + once)


def test_each_loop_over_a_batch_draws_other_random_numbers_and_a_new_run_the_same() -> None:
    def draw() -> list[float]:
        state = training()
        batch = first(state)
        drawn = [[float(torch.rand(())) for _ in state.model.parts(batch)] for _ in range(2)]
        return [*drawn[0], *drawn[1], float(torch.rand(())), float(np.random.rand())]

    found = draw()
    torch.manual_seed(99)
    assert len(set(found)) == len(found)
    assert draw() == found


@pytest.mark.parametrize("has_generator", [False, True])
def test_items_draw_their_own_random_numbers_and_leave_those_of_the_process_alone(has_generator: bool) -> None:
    batches = {}
    for size, workers in ((1, 0), (2, 0), (1, 2)):
        ranks = []
        for rank in range(size):
            rows = Rows(40, np.random.default_rng(size) if has_generator else None)
            loader = se.data.ElasticDataLoader(rows, global_batch_size=20, shards=4, seed=1, num_workers=workers)
            loader.set_world(rank, size)
            torch.manual_seed(size)
            ranks += first(se.ObjectState(loader=loader))
            assert torch.initial_seed() == size
        batches[size, workers] = ranks
    assert all(
        torch.equal(one, other)
        for found in batches.values()
        for part, expected in zip(found, batches[1, 0], strict=True)
        for one, other in zip(part, expected, strict=True)
    )


def test_statistics_are_the_mean_over_shards_and_batches_are_counted_once() -> None:
    state = training()
    batch = first(state)
    norm = state.model.module[1]
    means = torch.stack([state.model.module[0](x).mean(0) for x, _ in batch])
    run(state, batch)
    assert torch.allclose(norm.running_mean, 0.1 * means.mean(0), rtol=1e-5)
    assert int(norm.num_batches_tracked) == 1


def test_a_batch_of_fewer_rows_than_shards_has_parts_for_those_that_have_rows() -> None:
    state = training(nn.Linear(4, 2), rows=3)
    batch = first(state)
    assert [len(x) for x, _ in batch] == [1, 1, 1]
    run(state, batch)
    assert gradient(state).abs().sum() > 0


def test_a_part_without_backward_adds_nothing() -> None:
    state = training(nn.Linear(4, 2), shards=6)
    batch = list(first(state))
    assert [len(x) for x, _ in batch] == [3, 3, 4, 3, 3, 4]
    for number, (x, _) in enumerate(state.model.parts(batch)):
        if number != 1:
            state.model(x).square().mean(1).sum().backward()
    mine = gradient(state)
    state.model.module.zero_grad()
    for number, (x, _) in enumerate(batch):
        if number != 1:
            (state.model.module(x).square().mean(1).sum() * len(x) / 20).backward()
    assert torch.allclose(mine, gradient(state), rtol=1e-5)


def test_a_model_may_change_its_dtype_between_loops() -> None:
    state = training(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    for batch, dtype in zip(state.loader, (torch.float32, torch.bfloat16), strict=True):
        state.model.module.to(dtype)
        state.optimizer.zero_grad()
        for _ in range(2):  # the second loop has slots for what the first one touched
            for x, _ in state.model.parts(batch):
                state.model(x.to(dtype)).square().mean().backward()
        assert {p.grad.dtype for p in state.model.parameters()} == {dtype}
        state.optimizer.step()
        state.commit()


def test_sparse_gradients_are_added_up_without_a_warning() -> None:
    state = training(nn.Sequential(nn.Embedding(30, 2, sparse=True), nn.Linear(2, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, _ in state.model.parts(first(state)):
            state.model(x.long().abs() % 30).square().mean().backward()
    assert state.model.module[0].weight.grad.is_sparse


def test_a_parameter_that_no_shard_uses_has_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    state = training(Two())
    run(state, first(state))
    assert state.model.module.used.weight.grad is not None
    assert state.model.module.unused.weight.grad is None


def leave(state: se.TorchState) -> None:
    for x, _ in state.model.parts(first(state)):
        state.model(x).sum().backward()
        break


def commit_inside(state: se.TorchState) -> None:
    for _ in state.model.parts(first(state)):
        state.commit()


def check_inside(state: se.TorchState) -> None:
    for _ in state.model.parts(first(state)):
        state.check_host_updates()


def commit_after_leaving(state: se.TorchState) -> None:
    leave(state)
    state.commit()


def loop_after_leaving(state: se.TorchState) -> None:
    leave(state)
    run(state, first(state))


def step_inside(state: se.TorchState) -> None:
    for x, _ in state.model.parts(first(state)):
        state.model(x).sum().backward()
        state.optimizer.step()


def clamp_inside(state: se.TorchState) -> None:
    for x, _ in state.model.parts(first(state)):
        state.model(x).sum().backward()
        for parameter in state.model.parameters():
            parameter.data.clamp_(-0.01, 0.01)


def renormalize(state: se.TorchState) -> None:
    state = training(nn.Sequential(nn.Embedding(30, 2, max_norm=0.1), nn.Linear(2, 2)))
    for x, _ in state.model.parts(first(state)):
        state.model(x.long() % 30)


def nest(state: se.TorchState) -> None:
    batch = first(state)
    for _ in state.model.parts(batch):
        run(state, batch)


def train_without_parts(state: se.TorchState) -> None:
    state.model(first(state)[0][0])


def give_something_else(state: se.TorchState) -> None:
    state.model.parts([torch.ones(5, 4)])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (commit_inside, "a commit came inside a loop"),
        (check_inside, r"check_host_updates\(\) came inside a loop"),
        (commit_after_leaving, "a commit came after a loop .* had been left before its end"),
        (loop_after_leaving, "began after a loop .* had been left before its end"),
        (clamp_inside, r"the parameter 0\.weight changed .*as does clamping weights"),
        (step_inside, r"the parameter 0\.weight changed .*optimizer.step\(\) was called there, which belongs after"),
        (renormalize, r"the parameter 0\.weight changed .*a forward changes weights, as Embedding\(max_norm=\)"),
        (nest, "began inside a loop"),
        (train_without_parts, r"called for training outside a loop over model.parts\(batch\)"),
        (give_something_else, "something else than one batch"),
    ],
)
def test_mistakes_are_refused_with_the_lines_to_write(act: Callable[[se.TorchState], None], words: str) -> None:
    with pytest.raises(TrainingCodeError, match=f"(?s){words}.*for part in state.model.parts"):
        act(training())


def test_a_loop_that_is_left_early_leaves_nothing_behind() -> None:
    state = training()
    state.model.module[0].weight.grad = torch.ones(3, 4)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    leave(state)
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert torch.equal(state.model.module[0].weight.grad, torch.ones(3, 4))
    assert state.model.module[0].bias.grad is None


def test_after_a_restore_training_goes_on_although_a_loop_had_been_left() -> None:
    state = training()
    state.commit()
    parts = iter(state.model.parts(first(state)))
    x, _ = next(parts)
    state.model(x).sum().backward()
    state.restore()
    restored = state.model.module[1].running_mean.clone()
    state.model.module[1].running_mean += 1
    parts.close()  # as late as the garbage collector may do it
    assert torch.equal(state.model.module[1].running_mean, restored + 1)
    state._begin(None)
    run(state, first(state))
    state.commit()


def test_an_unsharded_loader_has_no_parts() -> None:
    state = training(shards=None)
    with pytest.raises(SparkElasticError, match="shards="):
        state.model.parts(first(state))


def test_a_learning_rate_that_follows_the_size_is_refused() -> None:
    state = training(begin=False)
    state.register_reset_callbacks([se.scale_learning_rate(state.optimizer)])
    with pytest.raises(SparkElasticError, match="scale_learning_rate"):
        state._begin(None)


@pytest.mark.parametrize(("shards", "refused"), [(4, True), (None, False)])
def test_a_reset_callback_that_changes_how_the_optimizer_trains_is_refused(shards: int | None, refused: bool) -> None:
    state = training(begin=False, shards=shards)
    seen = []

    def scale(old: int, new: int) -> None:
        seen.append((old, new))
        state.optimizer.param_groups[0]["lr"] *= new / old

    state.register_reset_callbacks([scale])
    with on_stage() as stage:
        stage.max_np = 4
        stage.begin(state, previous_size=0)
        stage.begin(state, previous_size=1)
        assert seen == [(1, 1)]
        expected = pytest.raises(SparkElasticError, match=r"from 2 to 1 workers has changed lr \(0\.1 → 0\.05\) of the")
        with expected if refused else nullcontext():
            stage.begin(state, previous_size=2)
    assert seen == [(1, 1), (2, 1)]


def test_rows_by_hand_are_refused() -> None:
    with pytest.raises(SparkElasticError, match="a part weighs its rows"):
        training().model.set_rows(3)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_what_parts_note_is_exact_whatever_torchs_default_dtype_is(default: torch.dtype) -> None:
    state = training(nn.Linear(4, 2))
    torch.set_default_dtype(default)
    try:
        parts = state.model.parts(first(state))
        for x, _ in parts:
            state.model(x.float()).sum().backward()
            parts.note(tokens=2**24 + 1, third=1 / 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert parts.means == {"tokens": 2**24 + 1, "third": pytest.approx(1 / 3, rel=1e-14)}


def test_a_note_that_ranks_cannot_exchange_is_refused() -> None:
    state = training(nn.Linear(4, 2))
    parts = state.model.parts(first(state))
    next(iter(parts))
    with pytest.raises(ValueError, match=r"note\(loss=1e\+300\) is beyond what ranks exchange"):
        parts.note(loss=1e300)


def test_random_numbers_between_loops_follow_from_the_loaders_place() -> None:
    def drawn(by_itself: int = 0) -> list[float]:
        state = training()
        found = [random.random()]
        for batch in state.loader:
            found.append(random.random())
            run(state, batch)
            state.commit() if by_itself else state.check_host_updates()
            found.append(random.random())
            for _ in range(by_itself):  # as a validation by this rank's rows does
                random.random()
        return found

    random.seed(1)
    first_run = drawn()
    random.seed(2)
    assert drawn(by_itself=3) == first_run
    assert len(set(first_run)) == 5


@pytest.mark.parametrize("by_a_thread", [False, True])
def test_a_batch_that_is_fetched_ahead_leaves_the_random_numbers_of_a_part_alone(by_a_thread: bool) -> None:
    drawn = []
    for ahead in (False, True):
        state = training()
        batches = iter(state.loader)
        for _ in state.model.parts(next(batches)):
            if ahead and not drawn[1:]:
                fetch = Thread(target=next, args=(batches,)) if by_a_thread else None
                next(batches) if fetch is None else fetch.start()
                fetch is None or fetch.join()
            drawn.append(random.random())
    assert drawn[:4] == drawn[4:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 8, "shards": 4}, "shards=4 needs global_batch_size="),
        ({"global_batch_size": 8, "shards": 9}, "shards=9 cannot be more than global_batch_size=8"),
        ({"global_batch_size": 8, "shards": 0}, "shards must be a whole number from 1 on, not 0"),
        ({"global_batch_size": 8, "shards": 2, "shard": (0, 2)}, "not both"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        se.data.ElasticDataLoader(Rows(40), **arguments)


def test_fewer_shards_than_workers_that_may_come_are_refused_before_they_have_come() -> None:
    state = training(begin=False)
    with on_stage() as stage:
        stage.max_np = 5
        with pytest.raises(SparkElasticError, match="shards=4 are too few for max_np=5 workers"):
            stage.begin(state)


def test_another_number_of_shards_does_not_go_on_from_a_position() -> None:
    loaders = [se.data.ElasticDataLoader(Rows(40), global_batch_size=8, shards=shards) for shards in (4, 8, None)]
    with pytest.raises(ValueError, match="saved with shards=4, this loader has shards=8"):
        loaders[1].load_state_dict(loaders[0].state_dict())
    with pytest.raises(ValueError, match="saved with shards=4, this loader has shards=None"):
        loaders[2].load_state_dict(loaders[0].state_dict())


def test_torchs_compiler_makes_a_kernel_for_each_shape_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for all shapes fits the first shape, too: which one a shard got depended on the shards before it.

    After eight shapes, torch gave up compiling new ones.
    """
    import torch._dynamo

    # monkeypatch would delete these on leaving, as it does not find them in the module's __dict__.
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=True,
        fail_on_recompile_limit_hit=False,
        recompile_limit=8,
        accumulated_recompile_limit=256,
    ):
        monkeypatch.setattr(kernels, "MOST_SHAPES", 10)
        se.data.ElasticDataLoader(Rows(40), global_batch_size=8, shards=4)
        compiled: list[tuple[int, ...]] = []

        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(tuple(inputs[-1].shape))
            return graph.forward

        twice = torch.compile(lambda x: 2 * x, backend=backend)
        for rows in (3, 4, 3, 5, 4, 6, 7, 8, 9, 10, 11, 12):
            twice(torch.ones(rows, 2))
        assert compiled == [(rows, 2) for rows in range(3, 13)], "each shape once, with its own numbers"
        with pytest.raises(Exception, match="fail_on_recompile_limit_hit"):
            twice(torch.ones(13, 2))


def test_parts_of_tensors_begin_in_memory_of_their_own() -> None:
    batch = {"x": torch.arange(21.0).view(7, 3), "y": torch.arange(7)}
    cut = Cut(3, 7)
    found = divided(batch, cut.parts(0, 1), cut)
    assert [part["y"].tolist() for part in found] == [[0, 1], [2, 3], [4, 5, 6]]
    assert all(part["x"].storage_offset() == 0 and len(part["x"]) == len(part["y"]) for part in found)


def test_ragged_tensors_are_cut_at_rows() -> None:
    ragged = torch.nested.nested_tensor_from_jagged(torch.arange(10.0), torch.tensor([0, 2, 5, 6, 10]))
    cut = Cut(2, 4)
    found = [part["x"] for part in divided({"x": ragged}, cut.parts(0, 1), cut)]
    assert [[row.tolist() for row in part.unbind()] for part in found] == [
        [[0, 1], [2, 3, 4]],
        [[5], [6, 7, 8, 9]],
    ]


@pytest.mark.parametrize("batch", [[torch.ones(6), torch.ones(5)], [torch.ones(6), "word"], [torch.tensor(1.0)]])
def test_what_cannot_be_cut_is_refused(batch: Any) -> None:
    cut = Cut(3, 6)
    with pytest.raises(ValueError, match="consists of tensors of this rank's 6 rows"):
        divided(batch, cut.parts(0, 1), cut)


def test_a_list_of_parts_stays_a_list_of_as_many() -> None:
    cut = Cut(3, 6, is_divided=True)
    with pytest.raises(ValueError, match="a list of 3 parts"):
        divided([1, 2], cut.parts(0, 1), cut)
