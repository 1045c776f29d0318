"""The simulated world: time, threads, machines, processes, networks, GPUs and a disk. It knows nothing of jobs."""
