"""Whole jobs in one thread, under injected faults, replayable from a seed.

The real parts are the driver's machine and service, the task's service, the workers' control client, elastic loop, states,
worlds and repair, the control store, and the row tracker with its order and plan. The simulated ones are clock, threads,
processes, network, Gloo, Spark and its launcher, the supervisor with its warm parent, and the disk of durable checkpoints.
``product/seams.py`` passes the latter to the former.

The layers, each of which knows those before it: ``world`` (time, threads, machines, networks), ``product`` (what runs there),
``faults`` (what strikes it), ``checks`` (what has to hold). ``job`` plays one schedule, from its seed to the verdict.
"""
