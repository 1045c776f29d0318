"""Steps whose bits do not depend on the number of workers: ``model.parts(batch)`` over the shards of a global batch."""
