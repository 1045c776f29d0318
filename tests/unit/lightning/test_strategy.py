"""The strategy of each Trainer: no hooks of torch's wrapper, and nothing moves at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_nets import state_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_on_a_gpu_lightning_looks_for_no_torch_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it registers hooks for communication, with torch's wrapper, even if nobody has given any."""
    state = state_of("one")
    strategy: Any = state.trainer(accelerator="cpu", logger=False).strategy
    monkeypatch.setattr(type(strategy), "root_device", torch.device("cuda", 0))
    strategy.model = state.model
    strategy._register_ddp_hooks()


def test_a_trainer_that_has_ended_leaves_module_and_optimizers_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning moves both to the CPU, and the next world's Trainer back."""
    state = state_of("one")
    module: Any = state.model.module
    optimizer = state.optimizers[0]
    strategy: Any = state.trainer(accelerator="cpu", logger=False).strategy
    strategy.connect(module)
    strategy.optimizers = [optimizer]
    optimizer.state[module.net.weight]["momentum_buffer"] = torch.ones(1, 1, device="meta")
    moved: list[object] = []
    monkeypatch.setattr(module, "cpu", lambda: moved.append(module))
    strategy.teardown()
    assert not moved
    assert optimizer.state[module.net.weight]["momentum_buffer"].is_meta
    assert strategy.lightning_module is module
    assert strategy.optimizers == [optimizer]
