from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

from spark_elastic.task.processes import ExitSign, signal_open, usage_of

# A child with a child of its own in another session; the former dies just after the list of children was made.
DIES_WHILE_LOOKED_AT = """
import os, subprocess, sys
import psutil
from spark_elastic.task import processes

processes.adopt_orphans()
child = subprocess.Popen(
    [sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True).wait()"]
)
while not (grandchildren := psutil.Process(child.pid).children()):
    pass
look_below = processes._tree

def die_first(process):
    processes._tree = look_below
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return look_below(process)

processes._tree = die_first
processes.kill_descendants()
left = [process for process in grandchildren if process.is_running()]
print(left, psutil.Process().children())
for process in left:
    process.kill()
"""


def test_what_a_child_leaves_behind_is_killed_also_when_the_child_dies_between_two_looks() -> None:
    found = subprocess.run([sys.executable, "-c", DIES_WHILE_LOOKED_AT], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("[] []\n", "")


def test_open_files_are_written_that_only_the_garbage_collector_would_find(tmp_path: Path) -> None:
    """Each file that writes into another one is closed before it, whichever was made first."""
    code = """
import gzip, io, os, sys
import fsspec
from spark_elastic.task.processes import flush_open_files

class Odd(type):
    def __eq__(cls, other):
        raise RuntimeError

class Kept(metaclass=Odd):
    pass

kept = Kept()
kept.itself = kept
kept.text, kept.packed = open("text", "w"), io.TextIOWrapper(gzip.open("packed.gz", "wb"))
kept.stored = fsspec.open("file://" + os.path.abspath("stored.gz"), "wb", compression="gzip").open()
kept.result = type("Result", (io.BytesIO,), {})(b"all")
kept.closed, kept.read, kept.unread = open("closed", "w"), open(sys.executable, "rb"), open(os.pipe()[1], "wb")
kept.closed.close()
os.close(kept.unread.fileno())
kept.unread.write(b"to nobody")
for file in (kept.text, kept.packed):
    file.write("all")
kept.stored.write(b"all")
del file
flush_open_files()
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "text").read_text() == "all"
    for packed in ("packed.gz", "stored.gz"):
        assert gzip.decompress((tmp_path / packed).read_bytes()) == b"all"


def test_a_process_that_is_stopped_shows_it_and_one_that_goes_on_again_does_not() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    sign = ExitSign(child.pid)
    try:
        assert not sign.is_stopped()
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert sign.is_stopped()
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert not sign.is_stopped()
    finally:
        child.kill()
        child.wait()
    assert not sign.is_stopped()
    sign.close()


def test_a_process_that_ends_shows_the_sign_of_it_and_keeps_it_once_reaped() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    sign = ExitSign(child.pid)
    assert not sign.is_seen()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert sign.is_seen()
    child.wait()
    assert sign.is_seen()
    assert ExitSign(child.pid).is_seen()
    sign.close()


def test_what_a_process_uses_can_be_asked_for_until_it_is_gone() -> None:
    seconds, memory = usage_of(os.getpid()) or (0.0, 0)
    assert seconds > 0
    assert memory > 2**20
    child = subprocess.Popen(["true"])
    child.wait()
    assert usage_of(child.pid) is None


SHARES = """
import glob, os, signal, time
import torch
from spark_elastic.task import processes

processes.adopt_orphans()
ready, written = os.pipe()
pid = os.fork()
if pid == 0:
    torch.multiprocessing.set_sharing_strategy("file_system")
    shared = torch.ones(1000).share_memory_()
    os.write(written, b"x")
    time.sleep(600)
os.read(ready, 1)
before = len(glob.glob(f"/dev/shm/torch_{pid}_*"))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
processes.kill_descendants()
print(before, len(glob.glob(f"/dev/shm/torch_{pid}_*")))
"""


def test_torchs_manager_removes_the_shared_memory_of_a_killed_process_before_it_is_killed_itself() -> None:
    done = subprocess.run([sys.executable, "-c", SHARES], capture_output=True, text=True, check=True)
    assert done.stdout == "1 0\n"


def test_signals_for_a_process_that_has_ended_are_ignored() -> None:
    process = subprocess.Popen(["true"])
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    signal_open(descriptor, signal.SIGKILL)
    os.close(descriptor)
