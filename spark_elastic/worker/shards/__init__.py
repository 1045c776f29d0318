"""Steps whose bits do not depend on how many workers make them: `model.parts(batch)` over the shards of a global batch."""
