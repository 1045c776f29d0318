"""The part that runs in the Spark driver and decides which workers train together."""
