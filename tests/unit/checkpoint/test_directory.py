"""Checkpoint directories: attempts are claimed once, damage is found, partial checkpoints count for nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_stage import DAMAGES, SECRET_URL, fill, memory_url
from fsspec.implementations.memory import MemoryFileSystem

from spark_elastic.checkpoint.directory import VERSION, CheckpointDirectory, RemovedError, SupersededError
from spark_elastic.checkpoint.naming import CheckpointName, Claim, Listing
from spark_elastic.checkpoint.newest import load_checkpoint, load_model
from spark_elastic.driver.driver_place import CheckpointWish
from spark_elastic.errors import CheckpointError, DamagedError
from spark_elastic.protocol.ticket import CheckpointPlan

FIRST, SECOND, THIRD = CheckpointName(1, 1, 1), CheckpointName(1, 1, 2), CheckpointName(1, 2, 0)


@pytest.fixture(params=["disk", "object store"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(str(tmp_path / "a" / "b") if request.param == "disk" else memory_url())


def content(directory: CheckpointDirectory, name: CheckpointName) -> bytes:
    return directory.read_bytes(name, "a.bin", directory.manifest(name).files["a.bin"])


def test_a_directory_that_does_not_exist_is_empty(directory: CheckpointDirectory) -> None:
    assert directory.list() == Listing()


def test_a_directory_that_another_run_makes_while_it_is_listed_is_listed(tmp_path: Path) -> None:
    """Seen with runs that began at once: pyarrow lists it in vain, and then finds that it exists."""
    directory, other = (CheckpointDirectory(str(tmp_path / "a")) for _ in range(2))
    listed = iter([FileNotFoundError(f"Cannot list directory '{tmp_path / 'a'}'")])

    def list_in_vain(selector: Any) -> Any:
        for error in listed:
            fill(FIRST, other)
            raise error
        return other._files.get_file_info(selector)

    directory._files = SimpleNamespace(get_file_info=list_in_vain)
    assert directory.list().complete == {FIRST}


class Refusing(MemoryFileSystem):
    protocol = "refusing"
    refused = 1_000_000

    def info(self, path: str, **others: Any) -> Any:
        self._answer()
        return super().info(path, **others)

    def ls(self, path: str, *others: Any, **more: Any) -> Any:
        self._answer()
        return super().ls(path, *others, **more)

    def _answer(self) -> None:
        Refusing.refused -= 1
        if Refusing.refused >= 0:
            raise PermissionError("no credentials")


def test_a_store_that_refuses_access_does_not_look_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make a job start over that could resume."""
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    directory = CheckpointDirectory("refusing://folder")
    with pytest.raises(PermissionError, match="no credentials"):
        directory.list()
    monkeypatch.setattr(Refusing, "refused", 0)
    assert directory.list() == Listing()
    fill(FIRST, directory)
    monkeypatch.setattr(Refusing, "refused", 1)
    with pytest.raises(PermissionError, match="no credentials"):
        directory.list()
    assert directory.list().complete == {FIRST}


class RefusingWithin(MemoryFileSystem):
    protocol = "refusing-within"
    refused = str(FIRST)

    def ls(self, path: str, *others: Any, **more: Any) -> Any:
        if path.endswith(RefusingWithin.refused):
            raise PermissionError(path)
        return super().ls(path, *others, **more)


def test_a_checkpoint_that_cannot_be_listed_does_not_look_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run would start over, and remove it. fsspec's own way of listing leaves out what it cannot list."""
    fsspec.register_implementation("refusing-within", RefusingWithin, clobber=True)
    directory = CheckpointDirectory("refusing-within://folder")
    fill(FIRST, directory)
    with pytest.raises(PermissionError, match=str(FIRST)):
        directory.list()
    monkeypatch.setattr(RefusingWithin, "refused", "nothing")
    assert directory.list().complete == {FIRST}


def test_what_is_written_is_listed_and_read(directory: CheckpointDirectory) -> None:
    fill(FIRST, directory)
    assert directory.list().complete == {FIRST}
    assert content(directory, FIRST) == b"content"


def test_a_url_that_nothing_can_open_is_a_clear_error() -> None:
    with pytest.raises(CheckpointError, match="gopher://x cannot be opened"):
        CheckpointDirectory("gopher://x")


# ---------------------------------------------------------------- attempts


def test_attempts_count_up_and_the_last_claim_remains(directory: CheckpointDirectory) -> None:
    assert [directory.claim(), directory.claim()] == [1, 2]
    assert [claim.attempt for claim in directory.list().claims] == [2]


def test_an_attempt_is_above_every_checkpoint_that_is_there(directory: CheckpointDirectory) -> None:
    fill(CheckpointName(4, 1, 1), directory)
    assert directory.claim() == 5


def test_runs_that_claim_at_once_get_different_attempts(directory: CheckpointDirectory) -> None:
    runs = 6
    claimed: list[int] = []
    at_once = threading.Barrier(runs)

    def claim() -> None:
        at_once.wait()
        claimed.append(CheckpointDirectory(directory.url).claim())

    threads = [threading.Thread(target=claim) for _ in range(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == len(set(claimed)) == runs


def test_who_sees_another_claim_of_its_number_steps_back(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writes its claim between our first listing and our own claim."""
    write = CheckpointDirectory._write
    rivals = iter([Claim(1, "ff")])

    def late(self: CheckpointDirectory, path: str, *others: object) -> object:
        for rival in rivals:
            write(self, str(rival), [b""])
        return write(self, path, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointDirectory, "_write", late)
    assert directory.claim() >= 2


def test_a_number_that_was_used_and_given_up_meanwhile_is_not_used_again(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run claims 1, and a third one 2 (which removes the claim of 1), after our first listing."""
    write = CheckpointDirectory._write
    rivals = iter([Claim(2, "ff")])

    def late(self: CheckpointDirectory, path: str, *others: object) -> object:
        for rival in rivals:
            write(self, str(rival), [b""])
        return write(self, path, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointDirectory, "_write", late)
    assert directory.claim() >= 3


@pytest.mark.parametrize("fails", ["write", "list"])
def test_a_claim_that_fails_leaves_another_run_its_own(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A full disk: the file is there, and empty."""
    attempt = directory.claim()
    write, listing = CheckpointDirectory._write, CheckpointDirectory.list
    written: list[str] = []

    def write_nothing(self: CheckpointDirectory, path: str, pieces: Iterable[bytes], *others: Any) -> Any:
        written.append(path)
        entry = write(self, path, [b""], *others)
        if fails == "write":
            raise OSError(28, "No space left on device")
        return entry

    def list_no_more(self: CheckpointDirectory) -> Listing:
        if fails == "list" and written:
            raise OSError(5, "the store does not answer")
        return listing(self)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointDirectory, "_write", write_nothing)
        patched.setattr(CheckpointDirectory, "list", list_no_more)
        with pytest.raises(OSError, match=r"No space|does not answer"):
            CheckpointDirectory(directory.url).claim()
    assert len(written) == 1
    assert [claim.attempt for claim in directory.check_claim(attempt).claims] == [attempt]


def test_a_store_that_does_not_list_what_was_written_is_refused(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointDirectory, "list", lambda self: Listing())
    with pytest.raises(CheckpointError, match="does not list files that were just written there"):
        directory.claim()


def test_an_earlier_run_learns_that_it_was_superseded(directory: CheckpointDirectory) -> None:
    attempt = directory.claim()
    directory.check_claim(attempt)
    directory.claim()
    with pytest.raises(SupersededError, match=r"attempt 2.*attempt 1"):
        directory.check_claim(attempt)


def test_a_directory_that_is_removed_while_the_job_runs_is_no_other_place(tmp_path: Path) -> None:
    directory = CheckpointDirectory(str(tmp_path / "saved"))
    attempt = directory.claim()
    directory.check_claim(attempt)
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(RemovedError, match="the directory was removed while the job ran"):
        directory.check_claim(attempt)


def test_a_machine_that_sees_another_place_says_so(tmp_path: Path) -> None:
    attempt = CheckpointDirectory(str(tmp_path / "drivers")).claim()
    with pytest.raises(CheckpointError, match="all machines share"):
        CheckpointDirectory(str(tmp_path / "executors")).check_claim(attempt)


def test_the_folder_of_one_checkpoint_is_refused_as_that_of_a_job(directory: CheckpointDirectory) -> None:
    """Its own job would remove what another job has written there."""
    fill(FIRST, directory)
    one = CheckpointDirectory(f"{directory.url}/{FIRST}")
    for use in (one.try_to_write, one.claim):
        with pytest.raises(
            CheckpointError, match="is one checkpoint, and checkpoint= is the folder in which a job keeps"
        ):
            use()
    assert directory.list().complete == {FIRST}
    assert not one.list().claims


def test_another_programs_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"version": "1.0", "name": "a web page"}')
    directory = CheckpointDirectory(str(tmp_path))
    directory.try_to_write()
    assert directory.claim() == 1


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damage_of_a_file_is_found(tmp_path: Path, how: str) -> None:
    directory = CheckpointDirectory(str(tmp_path))
    fill(FIRST, directory)
    DAMAGES[how](tmp_path / str(FIRST) / "a.bin")
    with pytest.raises(DamagedError, match=r"checkpoint 000001-000001-000000001 .* is damaged"):
        content(directory, FIRST)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b'{"version": 1}', b'{"version": 1, "files": {}}'])
def test_a_damaged_manifest_is_found(tmp_path: Path, text: bytes) -> None:
    directory = CheckpointDirectory(str(tmp_path))
    fill(FIRST, directory)
    (tmp_path / str(FIRST) / "manifest.json").write_bytes(text)
    with pytest.raises(DamagedError):
        directory.read_bytes(FIRST, "a.bin", directory.manifest(FIRST).files.get("a.bin"))


def test_a_manifest_of_another_format_is_not_taken_for_damage(tmp_path: Path) -> None:
    directory = CheckpointDirectory(str(tmp_path))
    fill(FIRST, directory)
    (tmp_path / str(FIRST) / "manifest.json").write_bytes(b'{"version": 4, "parts": []}')
    with pytest.raises(
        CheckpointError, match="has format 4, and this release of spark_elastic reads formats 1 to 3"
    ) as error:
        directory.manifest(FIRST)
    assert not isinstance(error.value, DamagedError)


# ---------------------------------------------------------------- partial ones, and what goes


def test_a_write_that_fails_halfway_leaves_nothing(directory: CheckpointDirectory) -> None:
    def pieces() -> object:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        directory.write(FIRST, {"a.bin": [b"whole"], "b.bin": pieces()})  # type: ignore[dict-item]
    assert directory.list() == Listing()


def test_a_checkpoint_that_was_broken_off_is_not_complete_and_goes_with_the_next_one(
    directory: CheckpointDirectory,
) -> None:
    attempt = directory.claim()
    fill(FIRST, directory)
    directory._write(f"{SECOND}/a.bin", [b"half"])  # its writer was killed
    assert directory.list().newest_first == [FIRST]
    fill(THIRD, directory)
    directory.prune(attempt)
    listing = directory.list()
    assert (listing.complete, listing.partial) == ({FIRST, THIRD}, frozenset())


def test_a_folder_that_a_killed_writer_left_empty_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    directory = CheckpointDirectory(str(tmp_path))
    attempt = directory.claim()
    (tmp_path / str(FIRST)).mkdir()
    (tmp_path / "mine").mkdir()
    assert directory.list() == Listing(partial=frozenset({FIRST}), claims=directory.list().claims)
    fill(SECOND, directory)
    directory.prune(attempt)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {str(SECOND), "mine"}


def test_a_superseded_run_removes_nothing(directory: CheckpointDirectory) -> None:
    attempt = directory.claim()
    for name in (FIRST, SECOND, THIRD):
        fill(name, directory)
    directory.claim()
    with pytest.raises(SupersededError):
        directory.prune(attempt)
    assert directory.list().complete == {FIRST, SECOND, THIRD}


def test_a_removal_that_stops_halfway_leaves_no_complete_checkpoint(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError("the connection broke")

    fill(FIRST, directory)
    store = SimpleNamespace(delete_file=directory._files.delete_file, delete_dir=fail)
    monkeypatch.setattr(directory, "_files", store)
    with pytest.raises(OSError, match="broke"):
        directory.remove(FIRST)
    assert CheckpointDirectory(directory.url).list().partial == {FIRST}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("operations", range(6))
def test_a_writer_that_is_killed_at_any_operation_leaves_its_last_whole_checkpoint_the_newest(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    """Writes and prunes a third checkpoint; the operation that is interrupted is done by half."""
    attempt = directory.claim()
    for name in (FIRST, SECOND):
        fill(name, directory, content=str(name).encode())
    whole, write = CheckpointDirectory(directory.url), CheckpointDirectory._write
    left = [operations]

    def spend() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    def write_or_half(path: str, pieces: Iterable[bytes], *others: Any) -> Any:
        data = b"".join(pieces)
        try:
            spend()
        except Killed:
            if left[0] == -1:
                write(whole, path, [data[: len(data) // 2]])
            raise
        return write(whole, path, [data], *others)

    def delete_dir(path: str) -> None:
        spend()
        whole._files.delete_dir(path)

    def delete_file(path: str) -> None:
        spend()
        whole._files.delete_file(path)

    store = SimpleNamespace(
        delete_dir=delete_dir, delete_file=delete_file, get_file_info=whole._files.get_file_info, handler=None
    )
    monkeypatch.setattr(directory, "_write", write_or_half)
    monkeypatch.setattr(directory, "_files", store)
    killed = False
    try:
        fill(THIRD, directory, content=str(THIRD).encode())
        directory.prune(attempt)
    except Killed:
        killed = True
    assert killed == (operations < 5)  # two files, a manifest, and the first checkpoint's manifest and folder
    newest = next(name for name in whole.list().newest_first if is_whole(whole, name))
    assert newest == (SECOND if operations < 3 else THIRD)
    assert whole.claim() == attempt + 1


def test_a_writer_that_is_killed_while_it_writes_its_first_manifest_leaves_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: str, pieces: Iterable[bytes]) -> None:
        CheckpointDirectory._write(directory, path, [b"{"])
        raise Killed

    directory = CheckpointDirectory(str(tmp_path))
    monkeypatch.setattr(directory, "_write", half)
    with pytest.raises(Killed):
        directory.complete(FIRST, {}, VERSION)
    listing = CheckpointDirectory(str(tmp_path)).list()
    assert (listing.complete, listing.partial) == (frozenset(), {FIRST})


def is_whole(directory: CheckpointDirectory, name: CheckpointName) -> bool:
    try:
        return content(directory, name) == str(name).encode()
    except DamagedError:
        return False


def test_secrets_of_a_url_are_in_no_message(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    directory = CheckpointDirectory(SECRET_URL)
    module = torch.nn.Linear(1, 1)
    messages = []

    def note(call: Callable[[], Any]) -> None:
        with pytest.raises((CheckpointError, ValueError)) as raised:
            call()
        messages.append(str(raised.value))

    note(lambda: load_checkpoint(SECRET_URL))
    note(lambda: load_checkpoint(f"{SECRET_URL}/{FIRST}", best=True))
    note(lambda: load_model(SECRET_URL, module))
    note(lambda: directory.check_claim(1))
    attempt = directory.claim()
    directory.check_claim(attempt)
    note(lambda: directory.check_claim(attempt - 1))
    directory._delete(str(next(iter(directory.list().claims))))
    note(lambda: directory.check_claim(attempt))
    fill(FIRST, directory)
    directory._write(f"{FIRST}/score.json", [b"{"])
    directory.scores([FIRST])
    note(lambda: load_checkpoint(SECRET_URL))  # it has a manifest, and nothing that the manifest lists
    directory._write(f"{FIRST}/manifest.json", [b'{"version": 99}'])
    note(lambda: directory.manifest(FIRST))
    monkeypatch.setattr(directory, "list", Listing)
    note(directory.claim)
    note(lambda: CheckpointDirectory("odd://AK:S3CRET@bucket"))
    note(CheckpointWish("odd://AK:S3CRET@bucket", 1.0).check)
    for text in (*messages, *caplog.messages):
        assert "S3" not in text
        assert "…@bucket" in text
    assert "S3" not in repr(CheckpointWish(SECRET_URL, 1.0, {"secret": "S3"}))
    assert "S3" not in repr(CheckpointPlan(SECRET_URL, 1, 1.0, 1, b"S3"))
