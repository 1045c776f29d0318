"""A driver of its own that trains in local processes, for tests that end it: ``local_script.py FOLDER ACT``."""

from __future__ import annotations

import sys

import cloudpickle
import training

import spark_elastic


def main(folder: str, act: str) -> None:
    cloudpickle.register_pickle_by_value(training)
    if act == "trained":
        results = spark_elastic.run(training.count_steps, args=(30,), local=True, num_proc=2)
        print([result["counter"] for result in results], len({result["digest"] for result in results}))
    else:
        assert act == "ended"
        spark_elastic.run(training.die_quietly, args=(folder,), local=True, num_proc=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
