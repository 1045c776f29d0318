"""What saved files name is found, in whatever module it lies now."""

import pickle

import pytest

import spark_elastic as se
from spark_elastic import _saved_names


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("spark_elastic.collectives", "allreduce", "spark_elastic"),
        ("spark_elastic.worker.collectives", "allreduce", "spark_elastic"),
        ("spark_elastic.worker.state.base", "State", "spark_elastic"),
        ("spark_elastic.worker.state.base", "State.commit", "spark_elastic"),
        ("spark_elastic.estimator.store", "Store", "spark_elastic.estimator"),
        ("spark_elastic.worker.state.base", "Unknown", "spark_elastic.worker.state.base"),
        ("spark_elastic._script", "found_here", "spark_elastic._script"),
        ("spark_elastic.of_another_release", "found_here", "spark_elastic._script"),
        ("torch.nn", "found_here", "torch.nn"),
        ("torch.nn", "State", "torch.nn"),
        ("__main__", "State", "__main__"),
    ],
)
def test_public_names_are_found_in_the_package_that_exports_them(module: str, name: str, home: str) -> None:
    assert _saved_names.home_of(module, name) == home


def test_a_function_that_was_saved_from_a_module_that_is_gone_is_read() -> None:
    saved = pickle.dumps(se.allreduce, protocol=2).replace(
        se.allreduce.__module__.encode(), b"spark_elastic.of_another_release.collectives"
    )
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(saved)
    assert _saved_names.loads(saved) is se.allreduce
