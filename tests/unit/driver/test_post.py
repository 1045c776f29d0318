"""Letters are kept until they are acknowledged, and only those who have the job's key put or fetch any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_elastic.driver import post as module
from spark_elastic.driver.post import Addresses, Fetch, FetchLetters, Letter, PostOffice, Put, read_letters, visit
from spark_elastic.protocol.credentials import Credentials, create_credentials

# A guard: whoever waits this long waits in vain.
SECONDS = 60.0


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return create_credentials("post")


@pytest.fixture
def post(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostOffice]:
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.0)
    with PostOffice(credentials) as post:
        yield post


@pytest.fixture
def fetch(post: PostOffice, credentials: Credentials) -> Callable[[int], list[bytes]]:
    return lambda after: [letter.content for letter in visit(place(post), credentials, Fetch(after))]


def place(post: PostOffice) -> Addresses:
    return (("127.0.0.1", post.port),)


def test_letters_come_again_until_they_are_acknowledged(post: PostOffice, fetch: Callable[[int], list[bytes]]) -> None:
    post.put(b"one")
    post.put(b"two")
    assert fetch(0) == [b"one", b"two"]
    assert fetch(0) == [b"one", b"two"]
    assert fetch(1) == [b"two"]
    assert post.left() == [Letter(2, b"two")]


def test_a_letter_that_was_put_by_connection_is_fetched(
    post: PostOffice, credentials: Credentials, fetch: Callable[[int], list[bytes]]
) -> None:
    assert visit(place(post), credentials, Put(b"from afar")) == []
    assert not post.taken.is_set()
    assert fetch(0) == [b"from afar"]
    assert post.taken.wait(SECONDS)


def test_who_finds_no_letter_waits_for_one(post: PostOffice, fetch: Callable[[int], list[bytes]]) -> None:
    with ThreadPoolExecutor() as pool:
        early = pool.submit(fetch, 0)
        waiting(post)
        assert not early.done()
        post.put(b"late")
        assert early.result(SECONDS) == [b"late"]


def test_who_waits_is_answered_when_the_post_office_closes(credentials: Credentials) -> None:
    with ThreadPoolExecutor() as pool:
        with PostOffice(credentials) as post:
            waiter = pool.submit(visit, place(post), credentials, Fetch(0))
            waiting(post)
        assert waiter.result(SECONDS) == []
    assert [thread for thread in threading.enumerate() if thread.name == "spark_elastic-post"] == []


def waiting(post: PostOffice) -> None:
    """Return when a visit is going on."""
    end = time.monotonic() + SECONDS
    while not post._door.visits:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_all_have_arrived_once_the_last_is_acknowledged(
    post: PostOffice, credentials: Credentials, monkeypatch: pytest.MonkeyPatch, fetch: Callable[[int], list[bytes]]
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.01)
    post.put(b"one")
    fetch(0)
    assert not post.emptied.is_set()
    assert fetch(1) == []
    assert post.emptied.is_set()


def test_where_too_many_wait_letters_are_turned_away_and_counted(
    post: PostOffice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT", 2)
    for content in (b"1", b"2", b"3", b"4"):
        post.put(content)
    assert [letter.content for letter in post.left()] == [b"1", b"2"]
    assert (post.take_turned_away(), post.take_turned_away()) == (2, 0)


def test_who_has_another_jobs_key_gets_nothing(post: PostOffice) -> None:
    post.put(b"private")
    with pytest.raises(OSError, match=r"(?i)ssl|certificate|alert|connection"):
        visit(place(post), create_credentials("another"), Fetch(0))
    assert not post.taken.is_set()


def test_a_task_says_whether_it_has_reached_the_post_office(credentials: Credentials) -> None:
    with PostOffice(credentials) as post:
        post.put(b"one")
        there = FetchLetters(place(post), credentials, 0)
        assert read_letters(there([])) == [Letter(1, b"one")]
    assert read_letters(there([])) is None
