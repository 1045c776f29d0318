"""The product in the simulated world: what its processes run on, what Spark does with them, and what users train."""
