"""Models and loaders in any number and wrapping train as in one process, through a loss and a join."""

from __future__ import annotations

from typing import Any

import training

from spark_elastic.testing import kill


def test_models_compiled_and_in_containers_train_on_two_loaders_as_in_one_process_through_a_loss_and_a_join(
    run: Any,
) -> None:
    # Rank 1 is lost before a layer begins to train, rank 0 after it; each time another worker joins.
    result = run(
        training.many_models, 36, faults=[kill(rank=1, step=5), kill(rank=0, step=20)], min_np=1, max_np=2, num_proc=2
    )
    assert result.faults == 2
    assert {2, 1} <= set(result.sizes)
    for rank in result.results:
        assert rank["difference"] < 1e-9
        assert rank["trains"]
        assert all(was_called == (size > 1) for size, was_called in rank["hooked"])
    assert any(size > 1 for rank in result.results for size, _ in rank["hooked"])


def test_power_sgd_compresses_the_buckets_of_a_model_through_a_loss_and_a_join(run: Any) -> None:
    result = run(training.compress_by_power_sgd, 30, faults=[kill(rank=1, step=10)], min_np=1, max_np=3, num_proc=3)
    assert len(result.of("world_broken")) == 1
    assert len({rank["weights"] for rank in result.results}) == 1
    assert {rank["step"] for rank in result.results} == {30}
    assert result.faults == 1
    assert set(result.results[0]["sizes"]) | {2} == {2, 3}  # where it comes in time, the newcomer joins the next world
