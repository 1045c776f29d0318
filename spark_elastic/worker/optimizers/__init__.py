"""Optimizers: one that is divided among ranks, rates that follow the size of the world, and what torch's hooks see of steps."""
