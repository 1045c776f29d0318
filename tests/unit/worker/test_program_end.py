"""The end of the user's function, as at the end of a script. Each test has a process of its own, whose thread pools it ends."""

from __future__ import annotations

import subprocess
import sys


def output_of(code: str) -> str:
    script = f"import atexit, logging, multiprocessing, threading, time\nfrom spark_elastic.worker import program_end\n{code}"
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
        "program_end.end_program()\n"
        "print('end', flush=True)\n"
        "import os; os._exit(0)"
    )
    assert output_of(code).split() == ["thread", "handler", "end"]


def test_child_processes_that_are_no_daemons_are_waited_for() -> None:
    code = (
        "fork = multiprocessing.get_context('fork')\n"
        "child = fork.Process(target=time.sleep, args=(0.2,)); child.start()\n"
        "daemon = fork.Process(target=time.sleep, args=(600,), daemon=True); daemon.start()\n"
        "program_end.end_program()\n"
        "print(child.exitcode, daemon.exitcode)"
    )
    assert output_of(code).split() == ["0", "-15"]


def test_after_a_while_it_says_what_it_waits_for() -> None:
    code = (
        "import io\n"
        "program_end.PATIENCE_SECONDS = 0.05\n"
        "log, told = io.StringIO(), threading.Event()\n"
        "class Handler(logging.StreamHandler):\n"
        "    def emit(self, record):\n"
        "        super().emit(record); told.set()\n"
        "program_end.logger.addHandler(Handler(log))\n"
        "threading.Thread(target=told.wait, name='uploader').start()\n"
        "program_end.end_program()\n"
        "print(log.getvalue())"
    )
    assert "its worker still waits, as a script would, for uploader: end them" in output_of(code)
