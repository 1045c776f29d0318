"""The product in the simulated world: what its processes run on, what Spark does about them, and what users train."""
