"""Threads that are not Python's, seen from outside."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from spark_elastic.worker.backends.native_threads import native_threads, rest

SECONDS = 30.0


def test_the_thread_of_a_gloo_device_is_found_and_pythons_are_not() -> None:
    before, ended = native_threads(), threading.Event()
    python = threading.Thread(target=ended.wait)
    python.start()
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    found = native_threads() - before
    assert found
    assert python.native_id not in found
    del device
    ended.set()
    python.join()


def test_a_thread_that_waits_rests_until_it_is_woken() -> None:
    woken, ended = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        while not ended.is_set():
            woken.acquire()

    thread = threading.Thread(target=wait)
    thread.start()
    assert thread.native_id is not None
    resting = until_it_rests(thread.native_id)
    assert rest({thread.native_id}) == resting
    woken.release()
    end = time.monotonic() + SECONDS
    while rest({thread.native_id}) in (None, resting):
        assert time.monotonic() < end
    ended.set()
    woken.release()
    thread.join()
    end = time.monotonic() + SECONDS
    while rest({thread.native_id}) != {}:  # it has ended
        assert time.monotonic() < end


def test_a_thread_that_computes_does_not_rest() -> None:
    ended, computes = threading.Event(), torch.ones(256, 256)

    def compute() -> None:
        while not ended.is_set():
            torch.mm(computes, computes)

    thread = threading.Thread(target=compute)
    thread.start()
    assert thread.native_id is not None
    end = time.monotonic() + SECONDS
    while rest({thread.native_id}) is not None:  # it waits for the interpreter now and then
        assert time.monotonic() < end
    ended.set()
    thread.join()


def test_the_caller_and_threads_that_are_not_known_do_not_rest() -> None:
    assert rest({threading.get_native_id()}) is None
    assert rest(set()) is None


def until_it_rests(thread: int) -> dict[int, int]:
    end = time.monotonic() + SECONDS
    while (resting := rest({thread})) is None:
        assert time.monotonic() < end
    return resting
