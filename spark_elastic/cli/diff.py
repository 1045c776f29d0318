"""spark-elastic diff: says where two checkpoints first differ, bit for bit."""

from __future__ import annotations

import argparse
import json

from spark_elastic._plain import plain


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("diff", help="say where two checkpoints first differ", description=__doc__)
    parser.add_argument(
        "one",
        help="a checkpoint directory, as given to run(checkpoint=), whose newest checkpoint is read, or one checkpoint in it",
    )
    parser.add_argument("other", help="the checkpoint directory of another run, or another checkpoint")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(call=diff)


def diff(options: argparse.Namespace) -> int:
    """Print the first difference. Return 1 if there is one."""
    # These import torch, for which other commands need not wait.
    from spark_elastic.checkpoint.digest import digest, first_difference
    from spark_elastic.checkpoint.newest import load_checkpoint

    one, other = load_checkpoint(options.one), load_checkpoint(options.other)
    found = first_difference(one, other)
    if found is not None:
        path, how = found
        print(json.dumps({"equal": False, "path": path, "how": how}) if options.json else plain(f"{path}: {how}"))
        return 1
    content = digest(one)
    if options.json:
        print(json.dumps({"equal": True, "sha256": content.sha256, "uncompared": content.uncompared}))
        return 0
    print(f"equal: sha256 {content.sha256}")
    for path in content.uncompared:
        print(plain(f"! not compared, because reading it would run code: {path}"))
    return 0
