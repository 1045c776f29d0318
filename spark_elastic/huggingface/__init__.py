"""An elastic Hugging Face Trainer: after each change of the world it continues from the last commit, in the same process.

::

    def train_fn():
        trainer = ElasticTrainer(
            model=model, args=TrainingArguments(save_strategy="no"), train_dataset=dataset, global_batch_size=64
        )
        trainer.train()

    spark_elastic.run(train_fn, min_np=1, max_np=8)

Each worker is one process with one device, so the Trainer sees a single process. This package provides the batches, averages
the gradients and makes the commits. Requires ``pip install "transformers[torch]"``.
"""

from spark_elastic.huggingface.trainer import ElasticTrainer

__all__ = ["ElasticTrainer"]
