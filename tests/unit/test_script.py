"""Classes and functions of the user's script, which every process has by the same names."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

CLASSES = """
import enum, pickle, sys
from spark_elastic._pickling import dumps_for_peers
class Phase(enum.Enum):
    WARM = 1
class Item:
    pass
if len(sys.argv) == 1:
    sys.stdout.buffer.write(dumps_for_peers([Phase.WARM, Item(), Item]))
else:
    phase, item, kind = pickle.loads(sys.stdin.buffer.read())
    print(phase is Phase.WARM, type(item) is Item, kind is Item)
"""
FUNCTION = """
import enum, functools, gc, pickle, sys
import cloudpickle
from spark_elastic._pickling import dumps_for_peers
from spark_elastic._script import remember_script
class Phase(enum.Enum):
    WARM = 1
class Path:
    pass
def helper():
    return 1
def stage(number):
    class Stage:
        def scale(self):
            return 10 * number
    return Stage
def train(packed):
    gc.collect()  # the class of the last call, so that there is one by its name
    class Local(enum.Enum):
        WARM = 1
    if packed is None:
        return dumps_for_peers([Phase.WARM, Path(), Path, helper, {Local.WARM: 1}, stage(1)(), stage(2)()])
    own = stage(1)  # of the same name as stage(2)
    phase, path, kind, function, counts, one, other = pickle.loads(packed)
    stages = type(one) is own and (one.scale(), other.scale()) == (10, 20)
    return phase is Phase.WARM, type(path) is Path, kind is Path, function is helper, Local.WARM in counts, stages
class Train:
    def __call__(self, packed):
        return train(packed)
sent = [train, functools.partial(train), Train(), Train().__call__, functools.wraps(train)(lambda packed: train(packed))]
sys.stdout.buffer.write(cloudpickle.dumps(sent))
"""
WORKER = """
import pickle, sys
from pathlib import Path
from spark_elastic._script import remember_script
sent, packed = Path(sys.argv[1]), Path(sys.argv[2])
for number, function in enumerate(pickle.loads(sent.read_bytes())):
    remember_script(function)
    if not packed.exists():
        packed.write_bytes(function(None))
    print(*function(packed.read_bytes()))
"""
LOOKALIKES = """
import pickle, sys, torch
from spark_elastic._pickling import dumps_for_peers
def kinds():
    found = []
    for number in range(2):
        if number:
            class Kind:
                def call(self, x=2): return torch.tanh(x), (lambda: 2)()
        else:
            class Kind:
                def call(self, x=1): return torch.relu(x), (lambda: 1)()
        found.append(Kind)
    return found
def recursive():
    def down(n): return down(n - 1) if n else n
    class Kind:
        call = staticmethod(down)
    return Kind
first, second = kinds()
packed = [dumps_for_peers(kind) for kind in (first, second)]
only = recursive()
print(pickle.loads(packed[0]) is first, pickle.loads(packed[1]) is second, pickle.loads(dumps_for_peers(only)) is only)
del first
print(pickle.loads(packed[0]) is second)
"""


def test_peers_that_run_one_script_have_classes_in_common(tmp_path: Path) -> None:
    """On other ranks, an enum's member was none of the script's, and every comparison with it was False."""
    script = tmp_path / "script.py"
    script.write_text(CLASSES)
    packed = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True).stdout
    shown = subprocess.run([sys.executable, script, "load"], input=packed, stdout=subprocess.PIPE, check=True).stdout
    assert shown.split() == [b"True"] * 3
    phase, *_ = pickle.loads(packed)
    assert str(phase) == "Phase.WARM", "who runs another script gets the class itself"


def test_a_later_job_has_the_classes_of_its_own_script(tmp_path: Path) -> None:
    """In a job that resumed, an enum's member from the checkpoint was none of the script's."""
    for attempt in (1, 2):
        (tmp_path / "script.py").write_text(FUNCTION)
        sent = subprocess.run([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, check=True).stdout
        (tmp_path / f"sent{attempt}").write_bytes(sent)
        (tmp_path / "worker.py").write_text(WORKER)
        worker = [sys.executable, tmp_path / "worker.py", tmp_path / f"sent{attempt}", tmp_path / "packed"]
        shown = subprocess.run(worker, stdout=subprocess.PIPE, check=True).stdout
        assert shown.split() == [b"True"] * 30


def test_classes_of_functions_that_differ_in_names_defaults_or_inner_functions_are_not_one(tmp_path: Path) -> None:
    """One that applies tanh was taken for another of its name that applies relu."""
    script = tmp_path / "script.py"
    script.write_text(LOOKALIKES)
    shown = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True).stdout
    assert shown.split() == [b"True", b"True", b"True", b"False"]
