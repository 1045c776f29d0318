"""Elastic training with Lightning, in the same process: a State that makes a Trainer for each world.

::

    lit = LitNet()
    state = LightningState(lit, loader=se.data.ElasticDataLoader(dataset, global_batch_size=64))

    @se.elastic
    def train(state):
        state.trainer(max_epochs=10).fit(lit, state.loader)

A Trainer cannot change its number of processes. After each change of the world, a new Trainer continues from the last commit,
with the same module and optimizers. Requires ``pip install lightning``.
"""

from spark_elastic.lightning.state import LightningState

__all__ = ["LightningState"]
