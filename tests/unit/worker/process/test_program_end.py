"""The end of the user's function, as at the end of a script. Each test has a process of its own, whose thread pools it ends."""

from __future__ import annotations

import subprocess
import sys


def output_of(code: str) -> str:
    script = (
        "import atexit, logging, multiprocessing, threading, time\nfrom spark_elastic.worker.process import program_end\n"
        f"program_end.forget_handlers()\n{code}"  # as in a worker, which is a fork
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_threads_and_pools_end_first_and_then_exit_handlers_are_called() -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "goes_on = threading.Event()\n"
        "atexit.register(print, 'handler', flush=True)\n"
        "threading.Thread(target=lambda: (goes_on.wait(), print('thread', flush=True))).start()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "ThreadPoolExecutor(1).submit(goes_on.set)\n"
        "program_end.end_program(lambda: None)\n"
        "print('end', flush=True)\n"
        "import os; os._exit(0)"
    )
    assert output_of(code).split() == ["thread", "handler", "end"]


def test_child_processes_that_are_no_daemons_are_waited_for() -> None:
    code = (
        "fork = multiprocessing.get_context('fork')\n"
        "child = fork.Process(target=time.sleep, args=(0.2,)); child.start()\n"
        "daemon = fork.Process(target=time.sleep, args=(600,), daemon=True); daemon.start()\n"
        "manager = fork.Manager()\n"  # whose process is no daemon, and ends when it is told to
        "program_end.end_program(lambda: None)\n"
        "print(child.exitcode, daemon.exitcode)"
    )
    assert output_of(code).split() == ["0", "-15"]


SLOW = """
import io
program_end.PATIENCE_SECONDS, program_end.BEAT_SECONDS, program_end.LIMIT_SECONDS = 0.05, 0.01, {limit}
log, told = io.StringIO(), threading.Event()
class Handler(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        told.set()
program_end.logger.addHandler(Handler(log))
beats = []
"""
END = """
program_end.end_program(lambda: beats.append(1))
print(log.getvalue(), bool(beats), flush=True)
for child in multiprocessing.active_children():
    child.kill()
import os; os._exit(0)
"""


def test_after_a_while_it_says_what_it_waits_for_and_the_driver_hears_that_it_is_not_hung() -> None:
    for waits in ("threading.Thread(target=told.wait, name='uploader').start()", "atexit.register(told.wait)"):
        told = output_of(SLOW.format(limit=600) + waits + END)
        assert "its worker waits, as a script would, for " in told
        assert ("uploader: end that" in told) == ("uploader" in waits)
        assert told.rstrip().endswith("True")


def test_what_never_ends_is_cut_off() -> None:
    thread = "threading.Thread(target=threading.Event().wait, name='monitor').start()"
    child = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(30,), name='monitor').start()"
    queue = "queue = multiprocessing.Queue(); queue.put(bytes(10**6))"
    for waits in (thread, child, queue):
        told = output_of(SLOW.format(limit=0.2) + waits + END)
        assert "cut off 0.2 s after the function has returned: " in told
        assert ("monitor" in told) == ("monitor" in waits)


def test_handlers_and_finalizers_of_the_process_that_a_worker_is_forked_from_are_not_its_own() -> None:
    code = (
        "import os, weakref\n"
        "class Kept: pass\n"
        "one, other = Kept(), Kept()\n"
        "atexit.register(print, 'handler of the parent', flush=True)\n"
        "weakref.finalize(one, print, 'finalizer of the parent', flush=True).atexit = True\n"
        "if os.fork() == 0:\n"
        "    program_end.forget_handlers()\n"
        "    weakref.finalize(other, print, 'finalizer', flush=True)\n"
        "    atexit.register(print, 'handler', flush=True)\n"
        "    program_end.end_program(lambda: None)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "os._exit(0)"
    )
    assert output_of(code).split() == ["handler", "finalizer"]
