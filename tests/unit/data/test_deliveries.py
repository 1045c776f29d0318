"""Which batch a model is given: by its tensors, by what was fetched and not used yet, by its rows; else nobody knows."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.data.deliveries import Deliveries
from spark_elastic.errors import DataError


class Feed:
    """Two loaders as rank 0 of two sees them."""

    def __init__(self) -> None:
        self.log = Deliveries()
        self.loaders = {"a": object(), "b": object()}

    def fetch(self, rank_rows: tuple[int, int], loader: str = "a") -> torch.Tensor:
        batch = torch.randn(rank_rows[0], 3)
        self.log.note(self.loaders[loader], {"x": batch}, rank_rows, 0)
        return batch

    def rows_of(self, *inputs: torch.Tensor) -> tuple[int, ...] | None:
        found = self.log.find(inputs)
        return None if found is None else found.rank_rows


def test_before_the_first_batch_no_tensor_is_known_as_a_batch() -> None:
    assert Feed().rows_of(torch.ones(3)) is None


def test_a_batch_is_known_by_its_tensors_and_by_views_of_them_however_many_were_fetched() -> None:
    feed = Feed()
    first, second, third = feed.fetch((3, 4)), feed.fetch((3, 3)), feed.fetch((3, 1), "b")
    assert feed.rows_of(second[:2].T) == (3, 3)
    assert feed.rows_of(first) == (3, 4)
    assert feed.rows_of(third.unsqueeze(0)) == (3, 1)


def test_batches_that_a_loader_cuts_from_one_storage_are_told_apart() -> None:
    feed = Feed()
    first, second = torch.randn(8, 3).split_with_sizes([3, 5])
    feed.log.note(feed, {"x": first}, (3, 4), 0)
    feed.log.note(feed, {"x": second}, (5, 3), 0)
    assert feed.rows_of(first[1:, :2]) == (3, 4)
    assert feed.rows_of(second.T) == (5, 3)
    with pytest.raises(DataError, match="several batches at once"):
        feed.rows_of(first, second)


def test_jagged_rows_are_known_by_their_values() -> None:
    feed = Feed()
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    feed.log.note(feed, [rows], (2, 1), 0)
    feed.fetch((2, 2))
    assert feed.rows_of(rows) == (2, 1)


def test_what_is_not_of_a_batch_belongs_to_the_one_that_was_fetched_and_not_used_yet() -> None:
    feed = Feed()
    for rank_rows in [(3, 4), (3, 3), (3, 1)]:
        batch = feed.fetch(rank_rows)
        assert feed.rows_of(batch * 2) == rank_rows
        assert feed.rows_of(torch.ones(17)) == rank_rows


def test_of_several_it_belongs_to_the_one_with_as_many_rows() -> None:
    feed = Feed()
    first, second = feed.fetch((3, 4)), feed.fetch((4, 4))
    assert feed.rows_of(first * 2) == (3, 4)
    third = feed.fetch((5, 4))
    assert feed.rows_of(second * 2) == (4, 4)
    assert feed.rows_of(second * 3) == (4, 4)
    assert feed.rows_of(third * 2) == (5, 4)


def test_what_a_model_was_given_or_has_made_of_a_batch_is_of_that_batch() -> None:
    feed = Feed()
    first, _ = feed.fetch((3, 4)) * 2, feed.fetch((4, 4))
    found = feed.log.find([first])
    assert found is not None
    features = torch.ones(5)
    feed.log.becomes(found, features)
    feed.fetch((5, 1))
    assert feed.rows_of(first) == feed.rows_of(features.detach()) == (3, 4)


@pytest.mark.parametrize("is_of_the_batch", [False, True], ids=["converted", "own tensors"])
@pytest.mark.parametrize("rows", [3, 17], ids=["as many rows", "other rows"])
def test_what_comes_with_one_batch_after_another_does_not_tell_batches_apart(rows: int, is_of_the_batch: bool) -> None:
    """A mask, a table of positions or a memory was taken for the batch with which it first came."""
    feed, positions = Feed(), torch.ones(rows)
    for rank_rows in [(3, 4), (3, 4), (3, 1), (4, 1), (3, 4)]:
        batch = feed.fetch(rank_rows)
        for _ in range(2):
            assert feed.rows_of(batch if is_of_the_batch else batch * 2, positions) == rank_rows
            assert feed.rows_of(positions, batch * 3) == rank_rows


def test_what_comes_with_another_batch_for_the_first_time_goes_by_rows() -> None:
    feed, positions = Feed(), torch.ones(4)
    for rank_rows in [(4, 3), (3, 1)]:
        batch = feed.fetch(rank_rows)
        assert feed.rows_of(batch * 2, positions) == rank_rows


def test_a_model_that_is_given_nothing_but_a_constant_is_given_the_batch_that_was_fetched() -> None:
    feed, nodes = Feed(), torch.ones(9, 2)
    for rank_rows in [(3, 4), (3, 4), (3, 1), (4, 4)]:
        batch = feed.fetch(rank_rows)
        assert feed.rows_of(nodes) == feed.rows_of(batch * 2) == rank_rows
        assert feed.rows_of(batch) == rank_rows


def test_a_state_that_a_model_carries_on_is_not_of_the_batch_that_it_was_made_of() -> None:
    feed, carried = Feed(), torch.zeros(3)
    for rank_rows in [(3, 4), (3, 4), (3, 1)]:
        batch = feed.fetch(rank_rows)
        found = feed.log.find([batch * 2, carried.detach()])
        assert found is not None
        assert found.rank_rows == rank_rows
        carried = torch.zeros(3)
        feed.log.becomes(found, carried)
        feed.log.committed()


def test_a_constant_in_every_batch_does_not_tell_batches_apart() -> None:
    """A collate function may return the same tensor with each batch."""
    feed, edges = Feed(), torch.ones(5, 2)
    for rank_rows in [(3, 4), (3, 4), (3, 1), (4, 4)]:
        batch = torch.randn(rank_rows[0], 3)
        feed.log.note(feed, (batch, edges), rank_rows, 0)
        assert feed.rows_of(batch * 2, edges) == feed.rows_of(batch, edges) == rank_rows
    ahead = [torch.randn(5, 3), torch.randn(6, 3)]
    for batch in ahead:
        feed.log.note(feed, (batch, edges), (len(batch), 2), 0)
    assert [feed.rows_of(batch * 2, edges) for batch in ahead] == [(5, 2), (6, 2)]


def test_a_batch_that_was_converted_is_used_on_after_another_was_fetched() -> None:
    feed = Feed()
    for rank_rows in [(3, 4), (3, 4), (4, 4)]:
        converted = feed.fetch(rank_rows) * 2
        assert feed.rows_of(converted) == rank_rows
        feed.fetch((2, 4))
        assert feed.rows_of(converted) == rank_rows
        assert feed.rows_of(torch.ones(2)) == (2, 4)


def made(feed: Feed, *inputs: torch.Tensor) -> torch.Tensor:
    """What a model makes of its inputs."""
    found, output = feed.log.find(inputs), torch.ones(len(inputs[0]))
    assert found is not None
    feed.log.becomes(found, output)
    return output


def test_batches_that_were_converted_once_are_used_for_several_epochs() -> None:
    feed = Feed()
    given = {}
    for rank_rows in [(3, 4), (3, 1)]:
        given[rank_rows] = feed.fetch(rank_rows) * 2
        assert feed.rows_of(given[rank_rows]) == rank_rows
    order = [(3, 4), (3, 1), (3, 4), (3, 4), (3, 1)]
    for rank_rows in order:
        assert feed.rows_of(given[rank_rows]) == rank_rows
        assert feed.rows_of(given[rank_rows], torch.randn(3)) == rank_rows, "with noise"
        feed.log.see([given[(3, 4)]])


def test_noise_that_is_given_with_what_a_model_has_made_of_a_batch_is_not_another_batch() -> None:
    feed = Feed()
    first, second = feed.fetch((3, 4)), feed.fetch((3, 1))
    one, other = made(feed, first), made(feed, second)
    assert feed.rows_of(one, torch.randn(3)) == (3, 4)
    assert feed.rows_of(other, torch.randn(3)) == (3, 1)


@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize("rows", [3, 5])
def test_what_a_model_has_made_comes_with_the_next_batch_after_a_step_and_else_nobody_knows(
    rows: int, is_converted: bool
) -> None:
    feed = Feed()
    found, carried = feed.log.find([feed.fetch((3, 4)) * 2]), torch.ones(rows)
    assert found is not None
    feed.log.becomes(found, carried)
    batch = feed.fetch((3, 1))
    if is_converted:
        with pytest.raises(DataError, match="together with what may be another batch") as raised:
            feed.rows_of(carried, batch * 2)
        assert raised.value.is_final
        feed.log.committed()
        batch = batch * 2
    assert feed.rows_of(carried, batch) == (3, 1)


def test_a_converted_batch_that_comes_with_another_one_is_an_error_where_shares_differ() -> None:
    feed = Feed()
    converted = feed.fetch((3, 4)) * 2
    assert feed.rows_of(converted) == (3, 4)
    with pytest.raises(DataError, match="several batches at once"):
        feed.rows_of(feed.fetch((3, 1)), converted)


def test_what_is_of_two_batches_is_an_error_where_shares_differ_and_else_remains_of_each() -> None:
    feed = Feed()
    one, other, third = (made(feed, feed.fetch(rank_rows, "b")) for rank_rows in [(3, 4), (3, 4), (3, 1)])
    assert feed.rows_of(one, other) == (3, 4)
    assert feed.rows_of(third) == (3, 1)
    assert [feed.rows_of(each) for each in (one, other)] == [(3, 4)] * 2
    with pytest.raises(DataError, match="several batches at once"):
        feed.rows_of(made(feed, feed.fetch((3, 3))), third)


def test_a_batch_is_given_with_what_was_made_of_it_and_that_again_by_itself() -> None:
    feed = Feed()
    batch = feed.fetch((3, 4))
    output = made(feed, batch)
    assert feed.rows_of(batch, output) == (3, 4)
    assert feed.rows_of(feed.fetch((3, 1), "b")) == (3, 1)
    assert feed.rows_of(output) == (3, 4)


def test_noise_with_a_converted_batch_is_not_the_batch_of_another_loader() -> None:
    feed = Feed()
    converted = feed.fetch((3, 4)) * 2
    assert feed.rows_of(converted) == (3, 4)
    feed.fetch((3, 1), "b")
    assert feed.rows_of(converted, torch.randn(3)) == (3, 4)


@pytest.mark.parametrize("times", [1, 2])
def test_a_constant_has_as_many_rows_as_another_batch(times: int) -> None:
    feed, table = Feed(), torch.ones(4)
    for _ in range(times):
        assert feed.rows_of(feed.fetch((3, 4)) * 2, table) == (3, 4)
    first, second = feed.fetch((3, 4)), feed.fetch((4, 4))
    assert feed.rows_of(first * 2, table) == (3, 4)
    assert feed.rows_of(second * 2, table) == (4, 4)


def test_input_buffers_that_are_filled_again_go_by_their_rows() -> None:
    feed, buffers = Feed(), {"a": torch.zeros(3, 3), "b": torch.zeros(5, 3)}
    shares = {"a": (3, 4), "b": (5, 2)}
    for _ in range(20):
        for loader, buffer in buffers.items():
            buffer.copy_(feed.fetch(shares[loader], loader))
        assert [feed.rows_of(buffer) for buffer in buffers.values()] == [*shares.values()]


def test_a_loader_may_deliver_the_same_tensor_again_and_windows_that_overlap() -> None:
    feed, whole = Feed(), torch.randn(9, 2)
    windows = [whole[:3], whole[:3], whole[2:6], whole[5:8]]
    for window in windows[:3]:
        rank_rows = (len(window), 4)
        feed.log.note(feed, window, rank_rows, 0)
        assert feed.rows_of(window) == rank_rows
    assert feed.rows_of(whole[5:6]) == (4, 4)
    feed.log.note(feed, windows[3], (3, 1), 0)
    assert feed.rows_of(whole[3:5]) == (4, 4)


def test_what_user_code_keeps_of_batches_long_past_is_not_remembered() -> None:
    feed, kept = Feed(), []
    for _ in range(100):
        kept += [batch := feed.fetch((3, 4)), made(feed, batch), made(feed, batch * 2)]
    remembered = (feed.log._own, feed.log._seen, feed.log._made)
    assert max(len(tensors._at) for tensors in remembered) <= 4 * 16


def test_two_loaders_and_a_constant() -> None:
    feed, mask = Feed(), torch.ones(7)
    for rank_rows, others in [((3, 4), (5, 4)), ((3, 4), (5, 5)), ((3, 1), (5, 4))]:
        one, other = feed.fetch(rank_rows) * 2, feed.fetch(others, "b") * 2
        assert feed.rows_of(one, mask) == rank_rows
        assert feed.rows_of(other, mask) == others
        assert feed.rows_of(mask, one) == rank_rows


@pytest.mark.parametrize("loader", ["a", "b"])
def test_where_shares_differ_and_nothing_tells_them_apart_it_is_an_error(loader: str) -> None:
    feed = Feed()
    first = feed.fetch((3, 4))
    feed.fetch((3, 3), loader)
    with pytest.raises(DataError, match=r"\(3, 3\) and \(3, 4\) rows.*set_rows"):
        feed.rows_of(first * 2)


def test_rows_of_several_batches_at_once_are_an_error_where_shares_differ() -> None:
    feed = Feed()
    first, second = feed.fetch((3, 4)), feed.fetch((3, 3), "b")
    with pytest.raises(DataError, match="several batches at once"):
        feed.rows_of(first, second)


def test_equal_shares_need_no_telling_apart() -> None:
    feed = Feed()
    first = feed.fetch((3, 4))
    feed.fetch((3, 4), "b")
    assert feed.rows_of(first * 2) == (3, 4)


def test_a_loop_that_has_ended_leaves_nothing_behind_once_another_batch_is_fetched() -> None:
    feed = Feed()
    feed.fetch((3, 4), "b")
    feed.log.end(feed.loaders["b"])
    batch = feed.fetch((3, 3))
    assert feed.rows_of(batch * 2) == (3, 3)


def test_the_last_batch_may_be_used_after_its_loop_has_ended() -> None:
    feed = Feed()
    batch = feed.fetch((3, 4))
    feed.log.end(feed.loaders["a"])
    assert feed.rows_of(batch * 2) == (3, 4)


def test_batches_of_another_world_are_forgotten() -> None:
    feed = Feed()
    batch = feed.fetch((3, 4))
    assert feed.rows_of(batch) == (3, 4)
    feed.log.forget(feed.loaders["a"])
    assert feed.rows_of(batch) is None


def test_batches_that_were_left_out_are_passed_over_once_a_later_one_is_known() -> None:
    feed = Feed()
    feed.fetch((3, 4))
    batch = feed.fetch((3, 3))
    assert feed.rows_of(batch) == (3, 3)
    later = feed.fetch((3, 1))
    assert feed.rows_of(later * 2) == (3, 1)


def test_a_batch_that_a_commit_has_counted_is_known_where_its_tensors_were_converted() -> None:
    deliveries = Deliveries()
    loader, batch = object(), torch.ones(4, 2)
    deliveries.note(loader, batch, (4, 4), 0)
    deliveries.find([batch.double()])
    deliveries.committed()
    deliveries.find([torch.rand(4, 2)])  # as a second model is given noise
    assert not deliveries.take_late_batch()

    deliveries.note(loader, torch.ones(4, 2), (4, 4), 0)
    deliveries.committed()  # of a batch that was left out
    deliveries.note(loader, batch, (4, 4), 0)
    deliveries.find([batch.double()])
    assert not deliveries.take_late_batch()

    deliveries = Deliveries()
    deliveries.note(loader, batch, (4, 4), 0)
    deliveries.committed()
    deliveries.find([batch.double()])
    assert deliveries.take_late_batch()


def test_a_batch_that_is_used_on_after_its_commit_is_told_until_another_is_delivered() -> None:
    deliveries, loader = Deliveries(), object()
    batch = torch.ones(4, 2)
    deliveries.note(loader, batch, (4, 4), 0)
    converted = batch.double()
    for _ in range(2):
        deliveries.find([converted])  # two steps, and one commit
    deliveries.committed()
    assert not deliveries.take_batch_again()
    deliveries.find([torch.rand(4, 2)])  # of a memory, for example
    assert not deliveries.take_batch_again()
    deliveries.find([converted[:2]])
    assert deliveries.take_batch_again()
    assert not deliveries.take_batch_again()

    deliveries.find([converted])  # as for a metric, without a step
    newer = torch.ones(4, 2)
    deliveries.note(loader, newer, (4, 4), 0)
    assert not deliveries.take_batch_again()
    for tensor in (converted, converted, newer):  # a loss of two batches in a row
        deliveries.find([tensor])
    assert not deliveries.take_batch_again()


class Steps(Feed):
    def step(self, rows: int, *given: torch.Tensor, are_set: bool = False) -> bool:
        """Take a step with a batch of so many rows, of which models are given these; True if there is something to tell."""
        batch = self.fetch((rows, 8))
        for inputs in given or (batch,):
            found = self.log.find([inputs])
            assert found is not None
            found.give([inputs])
        return self.log.note_step(are_set)


def test_steps_that_use_different_parts_of_their_batches_are_told_of_once() -> None:
    feed = Steps()
    assert not feed.step(8)
    assert not feed.step(8, torch.ones(5, 3), torch.ones(3, 3)), "micro-batches"
    assert not feed.step(8, torch.ones(20, 8, 3)), "a step of a sequence comes first"
    assert not feed.step(8, torch.ones(40, 3)), "a row has become several"
    assert not feed.step(8, torch.ones(5, 3), are_set=True)
    assert not feed.step(8, torch.ones(5, 3)), "another model may be given the rest"
    assert feed.step(8)
    assert not feed.step(8, torch.ones(5, 3))
    assert not feed.step(8)


def test_the_same_part_of_every_batch_and_several_steps_a_batch_are_no_reason_to_warn() -> None:
    feed = Steps()
    for rows in (32, 32, 31, 32):
        assert not feed.step(rows, torch.ones((rows + 1) // 2, 3)), "pairs"
    feed = Steps()
    for rows in (32, 32, 10, 32):
        batch = feed.fetch((rows, 32))
        for part in batch.split(16):
            found = feed.log.find([part])
            assert found is not None
            found.give([part])
            assert not feed.log.note_step(are_set=False), "a step for each part"
