"""Whole jobs in one thread, under injected faults, replayable from a seed.

What is real: the driver's machine and service, the task's service, the workers' control client, elastic loop, states, worlds,
repair, the control store, and the row tracker with its order and plan. What is simulated: clock, threads, processes, network,
Gloo, Spark and its launcher, the supervisor with its warm parent, and the disk of durable checkpoints. ``product/seams.py``
passes the latter to the former.

The layers, each of which knows those before it: ``world`` (time, threads, machines, networks), ``product`` (what runs there),
``faults`` (what befalls it), ``checks`` (what has to hold). ``job`` plays one schedule, from its seed to the verdict.
"""
