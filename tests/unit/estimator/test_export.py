"""Networks of models as programs: of torch.export, and ONNX where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from spark_elastic.estimator import TorchClassificationModel, TorchModel
from spark_elastic.estimator.layout import Input, Layout, positional_inputs

CATEGORIES = ("kind", "place")


@pytest.fixture
def model() -> TorchClassificationModel:
    """One that takes a vector and categories."""
    made = TorchClassificationModel(networks.WithCategories(), categoricalCols=list(CATEGORIES))
    layout = Layout(tuple(positional_inputs(["features"], CATEGORIES)))
    return made.describe(layout=layout, shapes={"features": (2,), "kind": (), "place": ()}, widths=[3])


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, 2), torch.randint(0, 3, (count, 2))


@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_program_of_torch_takes_any_number_of_rows_and_says_what_the_network_says(
    model: TorchClassificationModel, tmp_path: Path, count: int
) -> None:
    model.export(tmp_path / "network.pt2")
    program = torch.export.load(tmp_path / "network.pt2").module()
    assert model.model is not None
    given = rows(count)
    assert torch.allclose(program(*given), model.model(*given))


def test_a_path_may_begin_with_a_tilde(
    model: TorchClassificationModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model.export("~/network.pt2")
    assert (tmp_path / "network.pt2").is_file()


def test_onnx_says_what_the_network_says(model: TorchClassificationModel, tmp_path: Path) -> None:
    model.export(tmp_path / "network.onnx")
    evaluator = ReferenceEvaluator(str(tmp_path / "network.onnx"))
    features, codes = rows(20)
    (found,) = evaluator.run(None, dict(zip(evaluator.input_names, (features.numpy(), codes.numpy()), strict=True)))
    assert model.model is not None
    assert torch.allclose(torch.from_numpy(found), model.model(features, codes), atol=1e-6)


class Named(torch.nn.Module):
    """Returns its outputs in a dict, in another order than that of the columns."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"v": 2 * x, "u": x + 1}


def test_outputs_of_onnx_have_names(tmp_path: Path) -> None:
    for network, outputs, names in ((Named(), ("u", "v"), ["v", "u"]), (torch.nn.ReLU(), ("y",), ["y"])):
        layout = Layout((Input(None, ("x",)),), outputs=outputs)
        model = TorchModel(network, outputCols=list(outputs))
        model.describe(layout=layout, shapes={"x": ()}, widths=[0] * len(names)).export(tmp_path / "network.onnx")
        assert ReferenceEvaluator(str(tmp_path / "network.onnx")).output_names == names


def test_keywords_stay_keywords_and_whole_numbers_are_given_as_rows(tmp_path: Path) -> None:
    inputs = (Input("x", ("a", "b")), Input("code", ("c",)))
    model = TorchModel(networks.TwoHeads(), outputCols=["u", "v"]).describe(
        layout=Layout(inputs), shapes={"a": (), "b": (), "c": ()}, widths=[0, 3]
    )
    with pytest.raises(ValueError, match=r"(?s)TwoHeads cannot be exported with these columns: .* give some as rows="):
        model.export(tmp_path / "network.pt2")
    given = {"a": torch.rand(5), "b": torch.rand(5), "c": torch.arange(5) % 3}
    model.export(tmp_path / "network.pt2", given)
    found = torch.export.load(tmp_path / "network.pt2").module()(
        x=torch.rand(9, 2), code=torch.zeros(9, 1, dtype=torch.int64)
    )
    assert [output.shape for output in found] == [(9, 1), (9, 3)]


@pytest.mark.parametrize(
    ("facts", "path", "error"),
    [
        ({}, "network.pt", r"path must end in \.pt2 or \.onnx.*, not .*network\.pt'"),
        ({"shapes": {"features": None}}, "network.pt2", "column 'features' has lists of different lengths"),
        ({"layout": Layout(())}, "network.pt2", "does not know the shapes of its features yet"),
        ({"model": None}, "network.pt2", "has no network: give model="),
    ],
)
def test_what_cannot_be_exported_is_named(
    model: TorchClassificationModel, tmp_path: Path, facts: dict[str, Any], path: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        model.describe(**facts).export(tmp_path / path)
    assert not list(tmp_path.iterdir())
