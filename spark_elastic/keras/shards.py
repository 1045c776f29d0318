"""Steps over the shards of a batch, with the same bits in a world of any size; see ``worker/shards``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras
import torch
from keras.src.random.seed_generator import global_seed_generator

from spark_elastic.data.randomness import own_generators
from spark_elastic.errors import TrainingCodeError
from spark_elastic.keras.batches import Convert
from spark_elastic.keras.metrics import Totals, results_of, sum_over_shards
from spark_elastic.worker.shards.loops import loops
from spark_elastic.worker.shards.parts import Parts
from spark_elastic.worker.shards.sources import Buffer, Sources
from spark_elastic.worker.shards.workspace import Workspace
from spark_elastic.worker.world import World

if TYPE_CHECKING:
    from spark_elastic.keras.state import KerasState


class ShardedSteps:
    """Steps of ``fit`` over the shards of the loader's batches, in one generation; see ``worker/shards``."""

    def __init__(self, state: KerasState, world: World | None) -> None:
        self._state = state
        self._world = world
        self._workspace = Workspace()
        self._sources = self._find_sources()
        # The last ``convert``, and the seeds that it uses.
        self._seeds: tuple[Convert, list[keras.Variable]] | None = None
        # The variables that the optimizer is to change, according to the last part.
        self._applied: Sequence[keras.Variable] | None = None

    def step(self, batch: object, convert: Convert) -> Mapping[str, object]:
        """Compute this rank's shards of a batch, add up over all ranks, and update the weights. Return the logs."""
        state, model = self._state, self._state.model
        sources = self._find_sources()
        if sources.structure != self._sources.structure:
            self._workspace = Workspace()
        self._sources, self._applied = sources, None
        losses = [metric for metric in model.metrics if metric.name == "loss"]
        means = Totals(losses)
        others = Totals(metric for metric in model.metrics if state._is_fitting and metric.name != "loss")
        other_parts = []
        for weight in sources.parameters:
            weight.grad = None  # Keras leaves the last step's gradients, to which the loop would add
        parts = Parts(batch, sources, self._workspace, self._world)
        for part in parts:
            self._seed(convert)
            means.begin()
            others.begin()
            logs = type(model).train_step(model, keras.tree.map_structure(_as_tensor, convert(part)))
            parts.note(**{loss.name: loss.result() for loss in losses})
            state._noted(logs)
            if not parts.is_repeated:
                other_parts.append(others.part())
        others.add(sum_over_shards(other_parts) if state._is_fitting else [])
        self._seed(convert)
        if self._applied is not None:
            with torch.no_grad():
                gradients = [variable.value.grad for variable in self._applied]
                type(state.optimizer).apply(state.optimizer, gradients, self._applied)
        means.begin()
        for loss in losses:
            loss.update_state(parts.means[loss.name], sample_weight=parts.rows)
        means.add(means.part())
        return results_of(model, logs)

    def _seed(self, convert: Convert) -> None:
        """Seed what draws random numbers from torch's, which follow from the shard: layers, ``convert``, and Keras itself."""
        self._state._draw_seeds()
        if self._seeds is None or self._seeds[0] is not convert:
            self._seeds = convert, _seeds_of(convert)
        seed = int(torch.randint(2**31 - 1, ()))
        # Before release 3.13, set_random_seed leaves Keras's own generator as it is.
        for variable in (*self._seeds[1], global_seed_generator().state):
            variable.assign(torch.randint(2**31 - 1, tuple(variable.shape)))
        keras.utils.set_random_seed(seed)

    def gradients_are_there(self, variables: Sequence[keras.Variable] | None) -> None:
        """Note the variables that the optimizer is to change, for when the gradients are those of the batch, not of a part."""
        if loops.open is None:
            raise TrainingCodeError(
                "the loader was made with shards=, and the optimizer was given gradients outside of the model's train_step, "
                "which is what is called for each shard; train by model.fit, with Batches(state.loader, …)"
            )
        self._applied = variables or self._state.model.trainable_variables

    def _find_sources(self) -> Sources:
        weights = ((variable.path, variable.value) for variable in self._state.model.trainable_variables)
        moving = moving_of(self._state.model)
        return Sources(weights, (Buffer(variable.path, variable.value) for variable in moving))


def _seeds_of(convert: Convert) -> list[keras.Variable]:
    """Return the seeds of the layers and generators of Keras that a function uses."""
    found: list[keras.Variable] = []
    for user in own_generators(convert, kinds=(keras.random.SeedGenerator, keras.Layer)):
        if isinstance(user, keras.Layer):
            weights = set(map(id, user.weights))
            found += [variable for variable in user.variables if id(variable) not in weights]
        elif isinstance(user, keras.random.SeedGenerator):
            found.append(user.state)
    return found


def _as_tensor(value: object) -> torch.Tensor | None:
    return None if value is None else keras.ops.convert_to_tensor(value)


def moving_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that forwards change, such as BatchNormalization's averages, except those of frozen layers."""
    frozen = {id(weight) for layer in model._flatten_layers() if not layer.trainable for weight in layer.weights}
    weights = [weight for weight in model.non_trainable_weights if id(weight) not in frozen]
    return [weight for weight in weights if weight.value.is_floating_point()]
