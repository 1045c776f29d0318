"""Names of checkpoints: which is newer, what a listing says, what may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.checkpoint.naming import CheckpointName, Claim, Listing, choose_removals, read_listing

names = st.builds(CheckpointName, st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))


def name(*numbers: int) -> CheckpointName:
    return CheckpointName(*numbers)


def complete(*checkpoints: CheckpointName) -> Listing:
    return Listing(frozenset(checkpoints))


def test_a_later_attempt_is_newer_than_whatever_an_earlier_one_still_writes() -> None:
    assert name(2, 1, 0) > name(1, 9, 999_999)
    assert name(1, 2, 0) > name(1, 1, 10**10)


@given(names, names)
def test_names_sort_as_their_texts_do(one: CheckpointName, other: CheckpointName) -> None:
    assert (one < other) == (str(one) < str(other))


def test_a_checkpoint_is_complete_with_its_manifest_and_partial_before() -> None:
    listing = read_listing(
        [
            "000001-000002-000000003/tensors.bin",
            "000001-000002-000000003/manifest.json",
            "000001-000002-000000004/tensors.bin",
            "attempt-000007-ab12",
            "notes.txt",
            "attempt-x/manifest.json",
            "000001-000002/manifest.json",
        ]
    )
    assert listing == Listing(
        frozenset({name(1, 2, 3)}), frozenset({name(1, 2, 4)}), frozenset({Claim(7, "ab12")})
    )  # fmt: skip
    assert listing.highest_attempt == 7


@given(names, st.integers(0, 10**12))
def test_what_is_written_is_read_again(checkpoint: CheckpointName, attempt: int) -> None:
    claim = Claim(attempt, "0f")
    assert read_listing([str(claim), f"{checkpoint}/manifest.json"]) == Listing(
        frozenset({checkpoint}), claims=frozenset({claim})
    )


def test_checkpoints_count_as_traces_of_their_attempt() -> None:
    assert read_listing(["000003-000001-000000001/tensors.bin"]).highest_attempt == 3
    assert read_listing([]).highest_attempt == 0


def test_all_but_the_last_two_go_and_so_does_what_is_partial_and_older() -> None:
    listing = Listing(
        frozenset({name(1, 1, 1), name(1, 1, 5), name(2, 1, 1)}), frozenset({name(1, 1, 9), name(2, 1, 7)})
    )
    assert choose_removals(listing) == [name(1, 1, 1), name(1, 1, 9)]


def test_the_best_stays_however_old_it_is() -> None:
    listing = complete(*(name(1, 1, index) for index in range(5)))
    assert choose_removals(listing, best=[name(1, 1, 1)]) == [name(1, 1, 0), name(1, 1, 2)]
    assert choose_removals(listing, best=[name(1, 1, 4)]) == [name(1, 1, 0), name(1, 1, 1), name(1, 1, 2)]
    assert choose_removals(listing, keep=1, best=[name(1, 1, 0)]) == [name(1, 1, 1), name(1, 1, 2), name(1, 1, 3)]


def test_a_score_counts_beside_a_manifest_only() -> None:
    listing = read_listing(
        [
            "000001-000002-000000003/manifest.json",
            "000001-000002-000000003/score.json",
            "000001-000002-000000004/score.json",
        ]
    )
    assert listing.scored == {name(1, 2, 3)}


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_last_two() -> None:
    listing = complete(name(1, 1, 1), name(1, 1, 2), name(1, 1, 3))
    assert choose_removals(listing, {name(1, 1, 2)}) == [name(1, 1, 2)]
    assert choose_removals(listing, {name(1, 1, 3)}) == []


@given(st.frozensets(names), st.frozensets(names), st.frozensets(names))
def test_the_two_newest_whole_ones_and_all_that_is_newer_stay(
    whole: frozenset[CheckpointName], partial: frozenset[CheckpointName], damaged: frozenset[CheckpointName]
) -> None:
    removed = choose_removals(Listing(whole, partial - whole), damaged)
    kept = sorted(whole - damaged)[-2:]
    assert not set(removed) & set(kept)
    assert all(entry < kept[-1] for entry in removed)
    assert {entry for entry in whole | partial if kept and entry < kept[-1]} - set(removed) == set(kept[:-1])
