"""LightningState: the state of a LightningModule in training, which makes a Trainer for each world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from spark_elastic.lightning.checks import refuse_callback, refuse_settings
from spark_elastic.lightning.commits import Commits
from spark_elastic.lightning.csv_folders import begin_folders, note_loggers
from spark_elastic.lightning.strategy import Strategy
from spark_elastic.worker.context import device, size
from spark_elastic.worker.ddp.wrapper import DistributedDataParallel
from spark_elastic.worker.shards.sharding import refuse_loader
from spark_elastic.worker.state.torch_state import TorchState

# The Trainer settings that the job decides: each worker has one process and one device.
_OURS = ("strategy", "devices", "num_nodes", "use_distributed_sampler")


class LightningState(TorchState):
    """The state of a LightningModule in training: its weights, optimizers and schedulers, a loader, and any objects.

    ``module`` is wrapped, and its ``configure_optimizers`` is called once, here; every Trainer gets the result. ``loader`` is
    one of this package's loaders with ``global_batch_size=``. ``commit``, ``local`` and ``objects`` are as in ``TorchState``.
    Give ``find_unused_parameters=True`` if steps do not use all parameters. A step is committed after everything that follows
    its batch, such as a validation, together with the ``state_dict`` of callbacks such as ``EarlyStopping``. Raises
    ``ValueError`` if ``configure_optimizers`` returns no optimizer, and for a module with manual optimization.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        loader: object,
        commit: str = "copy",
        local: str | Iterable[str] | Mapping[str, object] | None = None,
        *,
        find_unused_parameters: bool = False,
        **objects: Any,
    ) -> None:
        """Move the module to ``device()``, call ``configure_optimizers`` once and for all, and wrap the module.

        Raises ``ValueError`` without an optimizer or with a sharded loader, and whatever the wrapper and ``TorchState`` raise.
        """
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} has automatic_optimization=False, and Lightning then prepares only its own wrapper for "
                "backward: write that loop with a TorchState, or optimize automatically"
            )
        refuse_loader(loader)
        # Move the module before it is wrapped and committed: both would have to be redone when the Trainer moves it.
        module.to(device())
        configured = _configured(module)
        found = list(_with_state(configured))
        optimizers = [each for each in found if isinstance(each, torch.optim.Optimizer)]
        if not optimizers:
            raise ValueError(f"{type(module).__name__}.configure_optimizers returns no optimizer, so nothing trains")
        module.configure_optimizers = lambda: configured  # type: ignore[method-assign]
        self._known = list(module.parameters())
        self._wrapped = DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)
        # Whether a fit has ended in this world.
        self._has_fitted = False
        # The callbacks of the last fit that write checkpoints.
        self._writers: list[pl.callbacks.ModelCheckpoint] = []
        # Under what keys Lightning keeps the time that callbacks have measured, on each rank.
        self._clocks: frozenset[str] = frozenset()
        super().__init__(
            model=self._wrapped,
            loader=loader,
            commit=commit,
            local=local,
            optimizers=optimizers,
            schedulers=[each for each in found if not isinstance(each, torch.optim.Optimizer)],
            progress=None,
            **objects,
        )

    def _compared_values(self) -> dict[str, object]:
        """Leave out what ``self.log`` has noted, which is each rank's own unless it is told to average, and clocks."""
        values = super()._compared_values()
        if self.progress is None:
            return values
        progress = {name: value for name, value in self.progress.items() if name != "metrics"}
        callbacks = {key: state for key, state in progress["callbacks"].items() if key not in self._clocks}
        return {**values, "progress": {**progress, "callbacks": callbacks}}

    def _enter_world(self, rank: int, size: int) -> None:
        super()._enter_world(rank, size)
        self._has_fitted = False
        begin_folders()

    def trainer(self, **settings: Any) -> pl.Trainer:
        """Return a Trainer for the current world that continues from the last commit. Call this inside the elastic function.

        settings: those of ``Trainer``, except ``strategy``, ``devices``, ``num_nodes`` and ``use_distributed_sampler``, which
        the job decides: they raise ``TypeError``. ``ValueError`` is raised for what would start over with each Trainer. Your
        callbacks run before the one that commits. The Trainer writes no checkpoints unless you give ``enable_checkpointing`` or
        a callback such as ``ModelCheckpoint``, because ``run(checkpoint=)`` writes them.
        """
        for name in _OURS:
            if name in settings:
                raise TypeError(
                    f"{name} is decided by the job, which has one process and one device per worker: leave it out"
                )
        refuse_settings(settings, self.loader)
        note_loggers(settings.get("logger"))
        callbacks = settings.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, pl.Callback) else list(callbacks)
        for callback in callbacks:
            refuse_callback(callback, has_logger=settings.get("logger") is not False)
        writes = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
        settings.setdefault("enable_checkpointing", writes)
        trainer = pl.Trainer(
            strategy=Strategy(self._wrapped),
            devices=1,
            num_nodes=size(),
            use_distributed_sampler=False,
            callbacks=[*callbacks, Commits(self)],
            **settings,
        )
        # The Trainer makes one for max_time=.
        timers = [each for each in trainer.callbacks if isinstance(each, pl.callbacks.Timer)]  # type: ignore[attr-defined]
        self._clocks = frozenset(timer.state_key for timer in timers)
        return trainer


def _configured(module: pl.LightningModule) -> Any:
    try:
        return module.configure_optimizers()
    except RuntimeError as error:
        if "not attached to a" not in str(error):
            raise
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers asks for its Trainer, and there is none yet, as optimizers outlive "
            "each Trainer here: give the module what it asks for, such as epochs * len(loader) for estimated_stepping_batches"
        ) from error


def _with_state(configured: object) -> Iterator[object]:
    """Yield the optimizers and schedulers in the result of ``configure_optimizers``, in whichever form it is."""
    if isinstance(configured, Mapping):
        configured = list(configured.values())
    if isinstance(configured, (list, tuple)):
        for each in configured:
            yield from _with_state(each)
    elif hasattr(configured, "state_dict"):
        yield configured
