"""A State of one's own: k-means with NumPy, without a torch model.

``ObjectState`` would do for a few arrays; a class of its own is for what has to be saved or sent in a special way. It says how
to save, to restore and to sync, and ``@elastic`` does the rest.

    spark-submit --master … examples/custom_state.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from pyspark.sql import SparkSession

import spark_elastic as se


class Clusters(se.State):
    """The centres of k clusters ``[k, 2]``, and the number of rounds that made them."""

    def __init__(self, centres: np.ndarray) -> None:
        super().__init__()
        self.centres = centres
        self.round = 0
        self.save()

    def save(self) -> None:
        """Keep a copy. It is made first and put in place by one assignment, so there is always a whole one."""
        self._saved = (self.centres.copy(), self.round)

    def restore(self) -> None:
        self.centres, self.round = self._saved[0].copy(), self._saved[1]

    def sync(self) -> None:
        """Take what a holder of the newest commit has: a newcomer has nothing, a survivor may be one round behind."""
        self.centres, self.round = se.broadcast_object((self.centres, self.round), src=self.donor)


def points_of(rank: int, size: int, count: int) -> np.ndarray:
    """This rank's share of ``count`` points around three places ``[n, 2]``: the same points in every world."""
    random = np.random.default_rng(0)
    places = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    points = places[random.integers(3, size=count)] + 0.5 * random.standard_normal((count, 2))
    return points[rank::size]


def train_fn(rounds: int, count: int) -> list[list[float]]:
    state = Clusters(np.array([[1.0, 1.0], [3.0, 1.0], [1.0, 3.0]]))

    @se.elastic
    def train(state: Clusters) -> None:
        points = points_of(se.rank(), se.size(), count)  # entered again in each world, with its share there
        while state.round < rounds:
            distances = np.linalg.norm(points[:, None] - state.centres[None], axis=2)
            nearest = np.eye(len(state.centres))[distances.argmin(1)]
            sums = np.concatenate([nearest.T @ points, nearest.sum(0)[:, None]], 1)
            sums = se.allreduce(torch.from_numpy(sums), "sum").numpy()  # raises where a worker is lost
            state.centres = sums[:, :2] / sums[:, 2:]
            state.round += 1
            state.commit()

    train(state)
    return state.centres.tolist()


def main(argv: Sequence[str] | None = None) -> list[list[list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--points", type=int, default=30_000)
    parser.add_argument("--workers", type=int, help="so many; default: one to begin with, then all that Spark has")
    options = parser.parse_args(argv)
    SparkSession.builder.appName("custom state").getOrCreate()
    results = se.run(
        train_fn, args=(options.rounds, options.points), min_np=1, num_proc=options.workers, max_np=options.workers
    )
    print("centres: " + ", ".join(f"({x:.3f}, {y:.3f})" for x, y in results[0]))
    return results


if __name__ == "__main__":
    main()
