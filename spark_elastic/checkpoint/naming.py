"""Names of checkpoints and claims. They show which checkpoint is the newest, and which may be removed. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

MANIFEST = "manifest.json"
# A file next to the manifest of a checkpoint that is one of the best so far, written once its metric was reported.
SCORE = "score.json"
# How many checkpoints are kept if the user does not say.
KEPT = 2
# How many seconds pass between two checkpoints if the user does not say.
INTERVAL = 60.0

_NAME = re.compile(r"(\d{6,})-(\d{6,})-(\d{9,})")
_CLAIM = re.compile(r"attempt-(\d{6,})-([0-9a-f]+)")


@dataclass(frozen=True, order=True, slots=True)
class CheckpointName:
    """Names a commit of any run of a job. A later attempt counts as newer, whatever an earlier attempt may still write."""

    attempt: int
    generation: int
    index: int

    def __str__(self) -> str:
        return f"{self.attempt:06d}-{self.generation:06d}-{self.index:09d}"


@dataclass(frozen=True, slots=True)
class Claim:
    """Says that a run has taken, or is trying to take, the number of an attempt. ``token`` tells runs apart."""

    attempt: int
    token: str

    def __str__(self) -> str:
        return f"attempt-{self.attempt:06d}-{self.token}"


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a directory. A complete checkpoint has a manifest; damage shows only when it is read."""

    complete: frozenset[CheckpointName] = frozenset()
    partial: frozenset[CheckpointName] = frozenset()
    claims: frozenset[Claim] = frozenset()
    scored: frozenset[CheckpointName] = frozenset()

    @property
    def newest_first(self) -> list[CheckpointName]:
        """Return the names of the complete checkpoints, the newest first."""
        return sorted(self.complete, reverse=True)

    def restricted(self, only: CheckpointName | None) -> Listing:
        """Return the listing with no other checkpoints than this one; with None, all of it."""
        if only is None:
            return self
        one = frozenset({only})
        return Listing(self.complete & one, self.partial & one, self.claims, self.scored & one)

    @property
    def highest_attempt(self) -> int:
        """The highest attempt of which there is a trace; 0 if there is none."""
        attempts = [name.attempt for name in self.complete | self.partial]
        return max([*attempts, *(claim.attempt for claim in self.claims)], default=0)


def read_name(text: str) -> CheckpointName | None:
    """Interpret the name of a folder; None if it is not a checkpoint's."""
    match = _NAME.fullmatch(text)
    name = None if match is None else CheckpointName(*map(int, match.groups()))
    # Another text for the same name has more leading zeros, or digits of another script.
    return name if str(name) == text else None


def read_listing(paths: Iterable[str]) -> Listing:
    """Interpret the paths of all files and folders (with a slash at the end), relative to the directory. Others' are ignored."""
    begun, complete, scored, claims = set(), set(), set(), set()
    for path in paths:
        folder, slash, file = path.partition("/")
        if slash and (name := read_name(folder)) is not None:
            begun.add(name)
            if file == MANIFEST:
                complete.add(name)
            elif file == SCORE:
                scored.add(name)
        elif match := _CLAIM.fullmatch(path):
            claims.add(Claim(int(match.group(1)), match.group(2)))
    return Listing(frozenset(complete), frozenset(begun - complete), frozenset(claims), frozenset(scored & complete))


def choose_removals(
    listing: Listing,
    damaged: Collection[CheckpointName] = (),
    keep: int = KEPT,
    best: Collection[CheckpointName] = (),
) -> list[CheckpointName]:
    """Choose which checkpoints to remove after one was written: all but the last ``keep`` undamaged ones and the ``best``.

    Newer checkpoints stay, because another run may be writing them.
    """
    whole = [name for name in listing.newest_first if name not in damaged]
    if not whole:
        return []
    kept = {*whole[:keep], *best}
    return sorted(name for name in listing.complete | listing.partial if name < whole[0] and name not in kept)
