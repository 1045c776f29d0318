import subprocess
import sys

FORKED = """
import sys
from spark_elastic.worker.process.warm_parent import import_everything

import_everything()
before = set(sys.modules)
import spark_elastic, torch

model = spark_elastic.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.Adam(model.parameters())
loader = spark_elastic.data.ElasticDataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)), batch_size=2)
state = spark_elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

@spark_elastic.elastic
def train(state):
    for (batch,) in state.loader:
        optimizer.zero_grad()
        state.model(batch).sum().backward()
        optimizer.step()
        state.commit()

train(state)
print(*sorted(name for name in set(sys.modules) - before if name.startswith("spark_elastic")))
"""


def test_what_a_worker_needs_has_been_imported_before_it_is_forked() -> None:
    process = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == []
