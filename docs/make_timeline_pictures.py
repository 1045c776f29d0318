"""Draws docs/timeline-light.png and docs/timeline-dark.png: the page of a job that loses a worker and gets another.

make browser
python docs/make_timeline_pictures.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import spark_elastic as se
from spark_elastic.testing import inject, kill
from spark_elastic.timeline import Timeline

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "tests" / "support"))

from browser import Browser  # noqa: E402

ROWS, EPOCHS = 40_000, 16


def train_fn() -> None:
    """Fit a line's sine by a small network."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, ROWS).unsqueeze(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(1, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
    )
    model = se.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    loader = se.data.ElasticDataLoader(torch.utils.data.TensorDataset(x, x.sin()), global_batch_size=500)
    state = se.TorchState(model=model, optimizer=optimizer, scheduler=schedule, loader=loader, epoch=0)

    @se.elastic
    def train(state: se.TorchState) -> None:
        while state.epoch < EPOCHS:
            for inputs, targets in state.loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
                optimizer.step()
                state.commit()
                state.report(loss=loss, gradient_norm=norm, learning_rate=schedule.get_last_lr()[0])
            state.epoch += 1
            print(f"epoch {state.epoch}: loss {loss.item():.6f}", flush=True)
            schedule.step()
            state.loader.set_epoch(state.epoch)
            state.commit()

    train(state)


def main() -> None:
    """Run the job, and have a browser show its page."""
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "events.jsonl", Path(folder) / "timeline.html"
        with inject(kill(rank=1, step=300)):
            se.run(train_fn, min_np=1, num_proc=2, max_np=2, local=True, event_log=str(log))
        Timeline(log).save(page)
        for name, dark in (("light", False), ("dark", True)):
            with Browser(dark=dark) as browser:
                browser.open(page.as_uri())
                browser.picture(DOCS / f"timeline-{name}.png")


if __name__ == "__main__":
    main()
