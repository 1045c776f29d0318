"""docs/formats.md opens checkpoints and saved models without this package, by the code that stands there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "kept" / "format-2"


def of_page(program: str) -> str:
    """What a program prints that begins with all code of the page, in a Python that cannot import spark_elastic."""
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    start = "import sys; sys.modules['spark_elastic'] = None\n"
    done = subprocess.run([sys.executable, "-c", start + code + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page_reads_a_checkpoint_that_all_ranks_wrote() -> None:
    folders = [str(KEPT.with_name(name) / "checkpoint") for name in ("format-2", "format-3")]
    printed = of_page(f"""
print([sorted((name, value.tolist()) for name, value in weights(folder).items()) for folder in {folders!r}])
print([repr(read_state(folder)["optimizer"]) for folder in {folders!r}])
""")
    for line in printed.splitlines():
        one, other = ast.literal_eval(line)
        assert one == other != []


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page_reads_the_kept_checkpoint_and_model() -> None:
    scores = json.loads((KEPT / "scores.json").read_text())
    printed = of_page(f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
network = torch.nn.Sequential(
    torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
)
network.load_state_dict(weights({str(KEPT / "checkpoint")!r}))
state = read_state({str(KEPT / "checkpoint")!r})
torch.optim.Adam(network.parameters()).load_state_dict(state["optimizer"])
assert torch.equal(network[0].weight, state["model"]["module.0.weight"])
assert state["model"]._metadata["module.1"] == {{"version": 2}}
assert all(torch.equal(t, torch.ones(2, 3).to(t.dtype)) for t in state["tensors"].values()), state["tensors"]
assert {{str(t.dtype) for t in state["tensors"].values()}} == set(state["tensors"])
assert state["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
features = torch.tensor([[row["a"], row["b"]] for row in {scores!r}])
print(json.dumps({{
    "values": [repr(state[name]) for name in ("epoch", "huge", "raw", "wave", "pair", "ordered", "torches", "number")],
    "scores": load_network({str(KEPT / "model")!r})(features).squeeze(1).tolist(),
}}))
""")
    found = json.loads(printed)
    from kept_state import odd, plain

    expected = {**plain(), **odd()}
    names = ("epoch", "huge", "raw", "wave", "pair", "ordered", "torches", "number")
    assert found["values"] == [repr(expected[name]) for name in names]
    assert found["scores"] == pytest.approx([row["score"] for row in scores], abs=1e-6)
