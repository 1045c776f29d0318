"""Kernels on which the bits of shards depend: which are here, and which made a saved position."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spark_elastic.data import ElasticDataLoader, kernels
from spark_elastic.data.kernels import difference, kernels_here
from spark_elastic.errors import DataError, TrainingCodeError
from spark_elastic.protocol.ticket import THREADS_VARIABLE


def sharded(**arguments: Any) -> ElasticDataLoader:
    return ElasticDataLoader(list(range(8)), global_batch_size=8, shards=2, **arguments)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def saved_with_other_threads(restored_threads: None) -> dict[str, Any]:
    torch.set_num_threads(kernels._BY_ITSELF + 1)  # which somebody has chosen, so it stays
    return sharded().state_dict()


def test_a_state_that_other_kernels_have_made_is_refused_with_both_named(
    saved_with_other_threads: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    with pytest.raises(DataError, match=r"threads was \d and is 1 here. Make them equal, or .*shards_strict=False"):
        sharded().load_state_dict(saved_with_other_threads)


def test_kernels_that_differ_are_warned_of_once_where_that_is_allowed(saved_with_other_threads: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    loader = sharded(shards_strict=False)
    with pytest.warns(UserWarning, match="bits may differ from now on: threads was"):
        loader.load_state_dict(saved_with_other_threads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(saved_with_other_threads)


def test_what_is_changed_in_the_elastic_function_is_refused_at_the_first_commit_as_newcomers_begin_without_it(
    restored_threads: None,
) -> None:
    loader = sharded()
    loader.set_world(0, 1)
    loader.state_dict()
    torch.set_num_threads(kernels._BY_ITSELF + 1)
    with pytest.raises(
        TrainingCodeError, match=r"threads was 1 and is \d here\. Make the change above the elastic function"
    ):
        loader.state_dict()
    loader.set_world(0, 1)  # a test's: entered with them
    loader.state_dict()


def test_what_is_changed_in_the_elastic_function_is_warned_of_where_bits_may_differ(restored_threads: None) -> None:
    loader = sharded(shards_strict=False)
    loader.set_world(0, 1)
    torch.set_num_threads(kernels._BY_ITSELF + 1)
    with pytest.warns(UserWarning, match="bits may differ from now on: threads was"):
        loader.state_dict()


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_both_names_of_the_instruction_set_that_onednn_may_use_are_compared(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kernels._build.__wrapped__()
    monkeypatch.setenv(variable, "SSE41")
    assert difference(before, kernels._build.__wrapped__()) == f"variables was none and is {variable}=SSE41 here"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process for which torch takes two threads by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(kernels, "_BY_ITSELF", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_process_with_shards_computes_with_one_thread_however_many_cores_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ElasticDataLoader(list(range(8)), global_batch_size=8)
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(THREADS_VARIABLE, "2")  # it follows from the number of slots
    sharded()
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_threads")
def test_a_model_that_was_made_before_the_threads_were_set_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_objects", list)  # without the models of other tests
    sharded()
    torch.set_num_threads(2)
    monkeypatch.setattr(gc, "get_objects", lambda: [torch.nn.ReLU(), torch.nn.Linear(2, 2)])
    words = "a model was made with 2 threads, before the loader .* Make the loader before the model"
    with pytest.warns(UserWarning, match=words) as told:
        sharded()
    assert told[0].filename == __file__
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_threads")
def test_a_number_of_threads_that_somebody_has_chosen_stays_with_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    sharded()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    sharded()
    assert torch.get_num_threads() == 2


def test_kernels_do_not_matter_without_shards() -> None:
    loader = ElasticDataLoader(list(range(8)), global_batch_size=8)
    assert "kernels" not in loader.state_dict()
    loader.load_state_dict(loader.state_dict())


def test_processors_that_torch_puts_into_one_class_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"cpu_name": "A", "avx512_vnni": True, "avx512_bf16": False, "sha": True, "l2_cache_size": 1}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    before = kernels._extensions.__wrapped__()
    capabilities |= {"cpu_name": "B", "avx512_bf16": True, "sha": False}
    now = kernels._extensions.__wrapped__()
    assert difference(before, now) == "extensions of the processor: avx512_bf16 only here"
    capabilities |= {"avx512_vnni": False}
    assert difference(before, kernels._extensions.__wrapped__()) == (
        "extensions of the processor: avx512_vnni missing here, avx512_bf16 only here"
    )
    capabilities |= {"cpu_name": "C", "avx512_vnni": True}
    assert difference(now, kernels._extensions.__wrapped__()) is None


def test_where_the_user_chooses_for_each_library_processors_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "_extensions", lambda: {"extensions": "avx512_bf16"})
    for name in ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "extensions" in kernels_here()
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert "extensions" not in kernels_here()


def test_a_state_of_before_extensions_were_compared_is_continued() -> None:
    here = {"torch": "2.13", "extensions": "avx2"}
    assert difference({"torch": "2.13"}, here) is None
    assert difference(here, {"torch": "2.13"}) is None


def test_kernels_are_described_by_plain_texts_which_a_checkpoint_holds_as_they_are() -> None:
    assert {type(value) for value in kernels_here().values()} == {str}


def test_of_switches_only_those_that_differ_are_named() -> None:
    saved, here = {"switches": "a=1, b=2, c=3"}, {"switches": "a=1, b=4, c=3"}
    assert difference(saved, here) == "switches was b=2 and is b=4 here"
    saved, here = {"libraries": "a, b"}, {"libraries": "b, a"}
    assert difference(saved, here) == "libraries was a, b and is b, a here"


def test_all_that_differs_is_named() -> None:
    assert difference({"torch": "2.6", "device": "cpu"}, {"torch": "2.6", "device": "H100", "variables": "A=1"}) == (
        "device was cpu and is H100 here; variables was none and is A=1 here"
    )
    assert difference(kernels_here(), kernels_here()) is None
