"""The columns of a batch become a model's arguments, and what it returns a list of outputs."""

from __future__ import annotations

import pytest
import torch

from spark_elastic.errors import DataError
from spark_elastic.estimator.layout import Input, Layout, ordered, outputs_of

ROWS = 5
FRACTIONAL = torch.tensor([1.0, 2.0, 3.0])


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(ROWS, *shape, dtype=dtype)


def test_columns_become_arguments() -> None:
    batch = {
        "a": zeros(dtype=torch.float64),
        "b": zeros(2),
        "i": zeros(dtype=torch.int32),
        "flag": zeros(dtype=torch.bool),
    }
    single = Input(None, ("a",)).tensor(batch)
    assert (single.shape, single.dtype) == ((ROWS,), torch.float32)
    grouped = Input("x", ("a", "b", "i", "flag")).tensor(batch)
    assert (grouped.shape, grouped.dtype) == ((ROWS, 5), torch.float32)
    assert Input("x", ("i",)).tensor(batch).dtype == torch.int64
    assert Input("x", ("i",)).tensor(batch).shape == (ROWS, 1)
    assert Input("x", ("a",), "int64").tensor(batch).dtype == torch.int64
    assert Input(None, ("a",), expand=True).tensor(batch).shape == (ROWS, 1)
    layout = Layout((Input(None, ("a",)), Input("x", ("b", "a"))), ("i",), "flag")
    assert layout.columns == ["a", "b", "i", "flag"]
    assert layout.call(lambda *args, **kwargs: (len(args), sorted(kwargs)), batch) == (1, ["x"])


def roles(labels: str, outputs: str = "") -> Layout:
    return Layout((Input(None, ("x",)),), tuple(labels.split()), None, tuple(outputs.split()))


@pytest.mark.parametrize(
    ("names", "layout", "expected"),
    [
        ("b a", roles("a b"), "a b"),
        ("b a more", roles("a b", "p q r"), "a b more"),
        ("q p", roles("a b", "p q"), "p q"),
        ("q a", roles("a b", "p q"), "a q"),
        ("any", roles("a b", "p"), "any"),
        ("vector y", roles("y", "score embedding"), "y vector"),
        ("other vector y", roles("y", "score vector other"), "y vector other"),
        ("q p", roles("", "p q"), "p q"),
        ("q p", roles(""), "q p"),
    ],
)
def test_names_order_the_outputs_of_a_dict(names: str, layout: Layout, expected: str) -> None:
    assert ordered(names.split(), layout) == expected.split()


@pytest.mark.parametrize(
    ("names", "layout", "error"),
    [
        ("first second", roles("a b", "p q"), "does not tell the one for 'a' or 'p'"),
        ("a second", roles("a b"), "does not tell the one for 'b'"),
        ("a b", roles("a b", "b a"), "does not tell the one for 'a' or 'b'"),
        ("a c", roles("a b", "p a"), "does not tell the one for 'b' or 'a'"),
        ("logits hidden", roles("y", "prediction"), r"the outputs 'logits', 'hidden', which .* label \('y'\)"),
        ("y one two", roles("y", "score vector other"), "does not tell the one for 'vector'"),
    ],
)
def test_names_that_do_not_tell_an_output_are_an_error(names: str, layout: Layout, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ordered(names.split(), layout)


def test_outputs_of_a_tuple_keep_their_places_and_those_of_a_dict_follow_their_names() -> None:
    one, two = zeros(), zeros(1)
    assert outputs_of((one, two), roles("a b")) == [one, two]
    assert outputs_of({"b": one, "a": two}, roles("a b")) == [two, one]
    with pytest.raises(TypeError, match="must return a tensor"):
        outputs_of("text", roles("a"))


def test_columns_side_by_side_have_one_type_and_a_type_that_was_given_stays() -> None:
    batch = {"a": FRACTIONAL, "i": FRACTIONAL.int()}
    codes = Input(None, ("i",), "int64", categorical=True)
    entries = (Input("x", ("a", "i")), Input("y", ("i",)), Input("z", ("a",), "int64"), codes)
    settled = Layout(entries).settled(batch)
    assert [entry.dtype for entry in settled.inputs] == ["float32", "int64", "int64", "int64"]
    assert settled.whole == ["i", "a"]
    assert torch.equal(settled.inputs[0].tensor(batch), entries[0].tensor(batch))


def test_an_index_without_a_row_in_an_embedding_names_the_columns_of_whole_numbers() -> None:
    layout = Layout((Input(None, ("code",), "int64"), Input(None, ("x",))))
    batch = {"code": torch.tensor([0, 7]), "x": torch.ones(2)}
    embedding = torch.nn.Embedding(3, 1)
    with pytest.raises(DataError, match=r"too few categories .*: 'code' up to 7 \(index out of range in self\)"):
        layout.call(lambda code, x: embedding(code) + x, batch)
