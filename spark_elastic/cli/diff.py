"""spark-elastic diff: says where two checkpoints first differ, bit for bit."""

from __future__ import annotations

import argparse


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("diff", help="say where two checkpoints first differ", description=__doc__)
    parser.add_argument(
        "one", help="a checkpoint directory, as given to run(checkpoint=); its newest checkpoint is read"
    )
    parser.add_argument("other", help="the checkpoint directory of another run")
    parser.set_defaults(call=diff)


def diff(options: argparse.Namespace) -> int:
    """Print the first difference. Return 1 if there is one."""
    # These import torch, for which no other command waits.
    from spark_elastic.checkpoint.digest import digest, first_difference
    from spark_elastic.checkpoint.newest import load_checkpoint

    one, other = load_checkpoint(options.one), load_checkpoint(options.other)
    found = first_difference(one, other)
    if found is None:
        print(f"equal: sha256 {digest(one)}")
        return 0
    path, how = found
    print(f"{path}: {how}")
    return 1
