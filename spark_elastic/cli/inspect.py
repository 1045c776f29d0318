"""spark-elastic inspect: shows the files and row groups of a Parquet dataset, and says what in them will slow training down.

Of a checkpoint directory it shows the checkpoints with their scores, the objects in the newest one, and the hash of their bits.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from spark_elastic._plain import plain
from spark_elastic._text import shown
from spark_elastic.errors import CheckpointError, DataError

# The readers of datasets and checkpoints import pyarrow and torch, for which other commands need not wait.
if TYPE_CHECKING:
    from spark_elastic.checkpoint.best import Score
    from spark_elastic.checkpoint.naming import CheckpointName
    from spark_elastic.data.manifest import Manifest

# A row group above the first size, or many below the second, are worth a warning. Both sizes are uncompressed but still
# encoded: a decoded row group may be larger, and a rank holds several of them.
HUGE_BYTES = 512 * 2**20
TINY_BYTES = 2**20
# Longer values of a State are left out.
LONGEST_VALUE = 60


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect", help="look at a Parquet dataset's files and row groups, or at a checkpoint", description=__doc__
    )
    parser.add_argument(
        "dataset",
        help="the directory, file or URL of a dataset, a checkpoint directory as given to run(checkpoint=), or one checkpoint",
    )
    parser.add_argument("--workers", type=int, default=8, help="the number of workers that will read it (default 8)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(call=inspect)


def inspect(options: argparse.Namespace) -> int:
    """Print the dataset's figures and warnings about them, or the figures of a checkpoint."""
    if options.workers < 1:
        raise ValueError(f"--workers must be a whole number from 1 on, not {options.workers}")
    from spark_elastic.data.manifest import read_manifest

    if _holds_checkpoints(options.dataset):
        return inspect_checkpoint(options)
    try:
        manifest = read_manifest(options.dataset)
    except DataError as error:
        raise DataError(
            f"{shown(options.dataset)} is no checkpoint directory, nor a dataset that can be read: {error}"
        ) from error
    facts = {**figures(manifest), "warnings": warnings(manifest, options.workers)}
    if options.json:
        groups = [
            {"path": g.path, "row_group": g.ordinal, "rows": g.rows, "bytes": g.uncompressed_bytes} for g in manifest
        ]
        print(json.dumps({**facts, "columns": _columns(manifest), "row_group_list": groups}))
        return 0
    low, middle, high = facts["rows_per_group"]
    small, usual, big = facts["bytes_per_group"]
    print(
        f"{plain(shown(options.dataset))}: {facts['files']:,} files, {facts['row_groups']:,} row groups, "
        f"{facts['rows']:,} rows"
    )
    print(f"  {size(facts['stored_bytes'])} stored, {size(facts['bytes'])} uncompressed")
    print(f"  rows in a group: {low:,} to {high:,}, median {middle:,}")
    print(f"  bytes in a group: {size(small)} to {size(big)}, median {size(usual)}")
    for name, kind in _columns(manifest).items():
        print(plain(f"  {name}: {kind}"))
    for warning in facts["warnings"]:
        print(plain(f"! {warning}"))
    return 0


def _holds_checkpoints(url: str) -> bool:
    from spark_elastic.checkpoint.newest import open_checkpoints

    try:
        directory, only = open_checkpoints(url)
        return only is not None or directory.list().highest_attempt > 0  # also where none is complete yet
    except (OSError, CheckpointError):
        return False  # ``read_manifest`` refuses what is neither a checkpoint nor a dataset


def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Print the checkpoints of a directory with their scores, and the newest one's objects and the hash of their bits."""
    from spark_elastic.checkpoint.content import decode
    from spark_elastic.checkpoint.digest import digest
    from spark_elastic.checkpoint.newest import load_newest, open_checkpoints, plain_objects

    directory, only = open_checkpoints(options.dataset)
    listing = directory.list().restricted(only)
    scores = directory.scores(listing.scored)
    saved = load_newest(directory, lambda name: decode(directory, name, unpickle=False), only=only)
    if saved is None:
        raise CheckpointError(f"{shown(options.dataset)} holds no complete checkpoint")
    objects = plain_objects(saved)
    content = digest(objects)
    checkpoints = [_described(name, scores.get(name)) for name in listing.newest_first]
    facts = {
        "checkpoints": checkpoints,
        "newest": str(saved.name),
        "steps": saved.steps,
        "workers": saved.size,
        "sha256": content.sha256,
        "uncompared": content.uncompared,
        "objects": {name: _sizes(value) for name, value in objects.items()},
    }
    if options.json:
        print(json.dumps(facts))
        return 0
    print(f"{plain(shown(options.dataset))}: {counted(len(listing.complete), 'checkpoint')}")
    for found in checkpoints:
        print(plain("  " + found["name"] + (f", {found['metric']} {found['value']:g}" if "metric" in found else "")))
    print(f"{saved.name}, {counted(saved.steps, 'step')}, {counted(saved.size, 'worker')}: sha256 {content.sha256}")
    for name, value in objects.items():
        print(plain(f"  {name}{_shown(value)}"))
    for path in content.uncompared:
        print(plain(f"! not in the hash, because reading it would run code: {path}"))
    return 0


def _described(name: CheckpointName, score: Score | None) -> dict[str, Any]:
    return {"name": str(name)} if score is None else {"name": str(name), "metric": score.metric, "value": score.value}


def _sizes(value: object) -> dict[str, int]:
    """Return the number of tensors in an object of a state, and their bytes."""
    import torch

    from spark_elastic.checkpoint.digest import entries

    tensors = [entry for entry in entries(value) if isinstance(entry.value, torch.Tensor)]
    return {"tensors": len(tensors), "bytes": sum(len(entry.data) for entry in tensors)}


def _shown(value: object) -> str:
    """Describe an object of a state: its tensors, or the value itself if it is a number or a short text."""
    sizes = _sizes(value)
    if sizes["tensors"]:
        return f": {counted(sizes['tensors'], 'tensor')}, {size(sizes['bytes'])}"
    if isinstance(value, (bool, int, float, str)) and len(repr(value)) <= LONGEST_VALUE:
        return f": {value!r}"
    return ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figures(manifest: Manifest) -> dict[str, Any]:
    """Count files, row groups, rows and bytes. Rows and bytes of row groups are given as (smallest, median, largest)."""
    rows = sorted(group.rows for group in manifest)
    sizes = sorted(group.uncompressed_bytes for group in manifest)
    return {
        "files": len(manifest.files),
        "row_groups": len(manifest),
        "rows": sum(rows),
        "stored_bytes": sum(file.size for file in manifest.files),
        "bytes": sum(sizes),
        "rows_per_group": _spread(rows),
        "bytes_per_group": _spread(sizes),
        "petastorm": bool(manifest.unischema),
    }


def warnings(manifest: Manifest, workers: int) -> list[str]:
    """Say what will slow down this many workers, and what to do about it."""
    found = []
    rows = manifest.rows
    total = int(rows.sum())
    if not total:
        return ["there are no rows"]
    biggest = max(range(len(manifest)), key=lambda number: manifest[number].rows)
    share = int(rows[biggest]) / total
    if len(manifest) < workers:
        found.append(
            f"{len(manifest)} row groups for {workers} workers: several workers read the same group. Write more and smaller "
            "ones (parquet.block.size, or repartition before writing)"
        )
    if share > 2 / min(workers, len(manifest)):
        found.append(
            f"{manifest.where(biggest)}, holds {share:.0%} of all rows: several workers read and decode it. "
            "Write it as several groups (parquet.block.size)"
        )
    huge = [number for number, group in enumerate(manifest) if group.uncompressed_bytes > HUGE_BYTES]
    if huge:
        worst = max(huge, key=lambda number: manifest[number].uncompressed_bytes)
        most = size(manifest[worst].uncompressed_bytes)
        found.append(
            f"{len(huge)} row groups take more than {size(HUGE_BYTES)} uncompressed, the largest {most} "
            f"({manifest.where(worst)}): on remote file systems a worker holds the compressed bytes of several at a time, and "
            'with engine="petastorm" it holds them decoded. Write smaller ones (parquet.block.size)'
        )
    median = _spread(sorted(group.uncompressed_bytes for group in manifest))[1]
    if len(manifest) > 100 * workers and median < TINY_BYTES:
        found.append(
            f"{len(manifest):,} row groups of {size(median)}: opening them costs more than reading. Coalesce before writing"
        )
    empty = sum(not group.rows for group in manifest)
    if empty:
        found.append(f"{empty} row groups are empty; they are skipped")
    return found


def size(count: float) -> str:
    """Format a number of bytes for people, such as 12.3 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _columns(manifest: Manifest) -> dict[str, str]:
    stored = {field.name: str(field.type) for field in manifest.schema}
    return {**stored, **{name: f"{kind}, from the path" for name, kind in manifest.partition_types.items()}}


def _spread(ordered: list[int]) -> tuple[int, int, int]:
    return (ordered[0], ordered[len(ordered) // 2], ordered[-1]) if ordered else (0, 0, 0)
