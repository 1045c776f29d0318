"""Written for torchrun, and knows nothing of us. Meets in a folder: python torchrun_script.py FOLDER EPOCHS.

A world of one waits to be ended by the arrival of another worker. In the first world of two the worker of rank 1 dies, in the
second the script raises on rank 1; the third gets through.
"""

import json
import os
import signal
import sys
import time

folder, epochs = sys.argv[1], int(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
names = "LOCAL_RANK LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS MASTER_ADDR"
note = {name: os.environ[name] for name in names.split()}
worlds_of_two = sum(name.startswith("two-") for name in os.listdir(folder))


if size == 1:
    time.sleep(120)
    sys.exit("nobody came")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402


@record
def fail():
    raise ValueError("a bad batch")


dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
dist.barrier()
if rank == 0:
    open(os.path.join(folder, f"two-{worlds_of_two}"), "w").close()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
saved = os.path.join(folder, "saved.pt")
start = 0
if os.path.exists(saved):
    checkpoint = torch.load(saved, weights_only=True)
    start = checkpoint["epoch"]
    model.module.load_state_dict(checkpoint["model"])
for epoch in range(start, epochs):
    model(torch.ones(4, 1)).sum().backward()
    if rank == 0:
        torch.save({"epoch": epoch + 1, "model": model.module.state_dict()}, saved + "~")
        os.replace(saved + "~", saved)
        with open(os.path.join(folder, "epochs"), "a") as file:
            file.write(json.dumps({"epoch": epoch, **note}) + "\n")
    dist.barrier()
    if rank == 1 and worlds_of_two == 0 and epoch == 1:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()  # and no rank gets beyond this epoch before the guardian ends this process, too
    if rank == 1 and worlds_of_two == 1 and epoch == 3:
        fail()
dist.destroy_process_group()
print("through", flush=True)
