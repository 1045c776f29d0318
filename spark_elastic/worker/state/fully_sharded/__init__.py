"""A State whose model is divided among ranks by torch's ``fully_shard``, so that no rank ever holds the whole of it."""
