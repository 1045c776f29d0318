"""What workers note of their imports, and the process that they are forked from imports for the next ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FORKED = """
import gc, os, sys
from spark_elastic.worker.process import imports

imports.MODULES = {modules}
for name in {imported}:
    if os.fork() == 0:
        __import__(name)
        imports.note_imports()
        os._exit(0)
    os.wait()
    imports.import_noted()
    imports.import_noted()
    print(*(module in sys.modules for module in imports.MODULES), gc.isenabled())
"""


def run(code: str) -> list[str]:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_what_a_worker_has_imported_is_imported_by_the_process_it_was_forked_from_and_nothing_else() -> None:
    shown = run(FORKED.format(modules=("wave", "colorsys"), imported=("this", "wave", "colorsys")))
    assert shown[-3:] == ["False False True", "True False True", "True True True"]


@pytest.mark.parametrize("error", ["raise ImportError", "1 / 0"])
def test_what_cannot_be_imported_is_left_to_workers_and_tried_once(error: str, tmp_path: Path) -> None:
    code = f"""
import sys, types
sys.path.insert(0, {str(tmp_path)!r})
with open({f"{tmp_path}/broken.py"!r}, "w") as broken:
    broken.write("print('tried'); {error}")
from spark_elastic.worker.process import imports
imports.MODULES = ("broken", "wave")
sys.modules["broken"] = sys.modules["wave"] = types  # as in a worker
imports.note_imports()
del sys.modules["broken"], sys.modules["wave"]
imports.import_noted()
imports.import_noted()
print("wave" in sys.modules)
"""
    assert run(code) == ["tried", "True"]


READS = """
import sys
from spark_elastic.worker.process import imports
from spark_elastic.worker.process import warm_parent

warm_parent.import_everything()
for name in imports.MODULES:
    __import__(name)
before = set(sys.modules)
import spark_elastic

(batch,) = spark_elastic.data.ParquetLoader({url!r}, batch_size=2)
assert batch["x"].tolist() == [1.0, 2.0]
print(*(name for name in set(sys.modules) - before if name.partition(".")[0] in ("spark_elastic", "pyarrow", "pandas")))
"""


def test_a_worker_that_reads_parquet_files_finds_all_that_takes_time_imported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "rows.parquet")
    assert run(READS.format(url=tmp_path.as_uri())) == [""]


PRELOADS = """
import os, sys
from spark_elastic.task import process_setting
from spark_elastic.worker.process import imports

os.environ[process_setting.PRELOAD_VARIABLE] = {names!r}
imports.preload()
print("wave" in sys.modules, "colorsys" in sys.modules)
"""


@pytest.mark.parametrize(
    ("names", "found"), [("", "False False"), (" wave,", "True False"), ("wave, colorsys", "True True")]
)
def test_what_the_user_names_is_imported(names: str, found: str) -> None:
    assert run(PRELOADS.format(names=names)) == [found]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module", "which cannot be imported by .*No module named 'no_such_module'"),
        ("1 / 0", "which cannot be imported by .*ZeroDivisionError"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(9,), name='mine', daemon=True).start()",
            r"whose import starts threads \(mine\)",
        ),
        ("import torch; torch.cuda.is_initialized = lambda: True", "whose import uses CUDA"),
    ],
)
def test_what_cannot_be_imported_ahead_of_a_fork_is_an_error_that_names_it(
    source: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "heavy.py").write_text(source)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}){PRELOADS.format(names='heavy')}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert re.search(f"SparkElasticError: SPARK_ELASTIC_PRELOAD names heavy, {words}", process.stderr)
