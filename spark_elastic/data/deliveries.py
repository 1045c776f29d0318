"""Determines which batch a model is given: what the loaders of a state have delivered, and how many rows each rank has.

A model's batch is recognized by its tensors, by views of them, and by what models were given beside these or have made of it.
Tensors that were converted, copied to a device, or drawn at random cannot be recognized in this way. They are taken to belong to
the fetched batch that has not been through a model yet; of several such batches, to the one with the same number of rows. If
batches of different shares remain, the batch cannot be determined, which is an error.

A tensor that comes with one batch after another (a mask, a table of positions, a state that is carried on) says nothing about
the batch, and is called a constant.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from spark_elastic.data.shards import Cut
from spark_elastic.errors import DataError, final

# The largest number of batches that code is expected to fetch ahead of the model.
_KEPT = 16


class Place(NamedTuple):
    """A tensor's place in memory: its storage, its first byte there, and the end. Views lie within it."""

    storage: int
    start: int
    end: int

    def overlaps(self, other: Place) -> bool:
        """Whether tensors at these places have memory in common."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


@dataclass(eq=False, slots=True)
class Delivery:
    """One batch. ``rank_rows`` are the rows of each rank; ``rows`` were delivered here, also those of a repeated batch."""

    loader: int
    rank_rows: tuple[int, ...]
    rank: int
    rows: int
    was_used: bool = False
    # Whether an optimizer has stepped, or a commit was made, since a model was first given the batch.
    is_over: bool = False
    # Whether a commit counted the batch as processed before a model was given it.
    was_counted: bool = False
    # How many rows models were given for gradients, all forwards together; whether user code set the number; whether it was
    # compared with those of other batches.
    given: int = 0
    was_set: bool = False
    was_judged: bool = False
    # How the batch is cut into shards, if at all, and how many loops over its parts there have been.
    cut: Cut | None = None
    loops: int = 0

    @property
    def weight(self) -> float:
        """The weight of this rank's part, which turns a mean over ranks into the mean over rows."""
        return weight_of_rank(self.rank_rows, self.rank)

    def give(self, inputs: Sequence[torch.Tensor]) -> None:
        """Count the rows of a forward's inputs. If any dimension fits, as in a sequence of steps, these are all rows."""
        sizes = {size for value in inputs for size in value.shape}
        lengths = [len(value) for value in inputs if value.dim()]
        self.given += self.rows if self.rows in sizes else max(lengths, default=self.rows)


def weight_of_rank(rank_rows: Sequence[int], rank: int) -> float:
    """Return the weight of a rank's mean over its rows that turns the mean over ranks into the mean over all rows."""
    total = sum(rank_rows)
    if total == 0:
        raise ValueError("no rank has a row of this global batch")
    return rank_rows[rank] * len(rank_rows) / total


class Tensors:
    """Tensors, each of a batch, which are recognized as long as they live, and by views of them."""

    def __init__(self) -> None:
        self._at: dict[int, list[tuple[weakref.ref[torch.Tensor], Place, Delivery]]] = {}

    def add(self, tensor: torch.Tensor, place: Place, batch: Delivery) -> None:
        """Recognize this tensor, which is at this place, as one of a batch, and of no other one."""
        others = [
            entry for entry in self._at.get(place.storage, ()) if entry[0]() is not None and entry[0]() is not tensor
        ]
        self._at[place.storage] = [*others, (weakref.ref(tensor), place, batch)]

    def batches(self, *places: Place) -> set[Delivery]:
        """Return the batches that have tensors at these places."""
        return {
            batch
            for place in places
            for ref, own, batch in self._at.get(place.storage, ())
            if ref() is not None and place.overlaps(own)
        }

    def move(self, place: Place, to: Tensors, exactly: bool = False) -> None:
        """Move the tensors at this place, or at exactly this one, to others."""
        for entry in self._at.pop(place.storage, []):
            moves = place == entry[1] if exactly else place.overlaps(entry[1])
            (to if moves else self)._at.setdefault(place.storage, []).append(entry)

    def keep(self, batches: Collection[Delivery] | None = None) -> None:
        """Forget tensors that are gone and, if batches are given, those of others."""
        live = {
            storage: [entry for entry in entries if entry[0]() is not None and (batches is None or entry[2] in batches)]
            for storage, entries in self._at.items()
        }
        self._at = {storage: entries for storage, entries in live.items() if entries}


class Deliveries:
    """The recent batches of this process's loaders, as long as a model may still be given them."""

    def __init__(self) -> None:
        self._kept: deque[Delivery] = deque(maxlen=_KEPT)
        self._ended: set[int] = set()
        self._last: Delivery | None = None
        # The tensors that were handed out; those that models were given besides, or have made of these; the latter alone; and
        # what has come with several batches.
        self._own, self._seen, self._made, self._constants = Tensors(), Tensors(), Tensors(), Tensors()
        # The thread that trains on shards, and whether it is in a loop over the parts of a batch.
        self.trainer, self.is_in_loop = 0, False
        # Whether a batch has been delivered since a model was last given one.
        self._is_fresh = False
        # Whether a model was first given a batch for gradients after the commit that counted the batch; and whether it was given
        # one again after that, with no other delivered since.
        self._came_after_its_commit = False
        self._came_again = False
        # The fraction that models were given of the first batch that was judged, and whether another one was found.
        self._fraction: float | None = None
        self._is_told = False

    def note(
        self, loader: object, batch: object, rank_rows: tuple[int, ...], rank: int, cut: Cut | None = None
    ) -> None:
        """Note a batch that a loader is about to hand out."""
        if self._ended:
            self._kept = deque((known for known in self._kept if known.loader not in self._ended), _KEPT)
            self._ended.clear()
        delivery = Delivery(id(loader), rank_rows, rank, rank_rows[rank] or min(sum(rank_rows), 2), cut=cut)
        self._kept.append(delivery)
        self._is_fresh = True
        self._came_again = False
        self._constants.keep()
        for tensors in (self._own, self._seen, self._made):
            tensors.keep(self._kept)
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                place = _place(leaf)
                self._own.move(place, self._constants, exactly=True)  # what was in an earlier batch, too, says nothing
                self._own.add(leaf, place, delivery)

    def end(self, loader: object) -> None:
        """Note the end of a loader's iteration. What it delivered may still be used until another batch is delivered."""
        self._ended.add(id(loader))

    def forget(self, loader: object) -> None:
        """Drop a loader's deliveries, because it has entered another world."""
        self._kept = deque((known for known in self._kept if known.loader != id(loader)), _KEPT)
        if self._last is not None and self._last.loader == id(loader):
            self._last = None

    def find(self, tensors: Sequence[torch.Tensor]) -> Delivery | None:
        """Return the batch that these tensors belong to; None if none has been delivered.

        Raises ``DataError`` if it could be one of several in which this rank has different shares.
        """
        if not self._kept:
            return None
        telling = self._telling(tensors)
        found = self._told_by(telling)
        if found is not None and found is self._kept[-1]:
            self._came_again |= found.was_counted and found.is_over
        # Converted tensors belong to no known batch. They come from a batch that a commit has counted if all unused ones have
        # been.
        is_certain = found is not None or all(known.was_counted for known in self._kept if not known.was_used)
        found = found or self._guess([tensor for tensor, place in telling if not self._constants.batches(place)])
        if is_certain and found.was_counted and not found.was_used:
            self._came_after_its_commit = True
        self._use(found)
        for tensor, place in telling:
            if not any(known.batches(place) for known in (self._constants, self._own, self._seen)):
                self._seen.add(tensor, place, found)
        return found

    def becomes(self, batch: Delivery, output: torch.Tensor) -> None:
        """Note what a model has made of a batch."""
        place = _place(output)
        self._seen.add(output, place, batch)
        self._made.add(output, place, batch)

    def take_late_batch(self) -> bool:
        """Whether a batch was first used for gradients after the commit that had counted it, since the last call."""
        was_late, self._came_after_its_commit = self._came_after_its_commit, False
        return was_late

    def take_batch_again(self) -> bool:
        """Whether a batch was used for gradients before the commit that counted it and again after that, since the last call."""
        came_again, self._came_again = self._came_again, False
        return came_again

    def note_step(self, are_set: bool) -> bool:
        """Note an optimizer's step. Return True, once, if models are given different fractions of the rows that are delivered.

        A batch is judged when a later one is in use, because several steps may share it. Differences of one row may come from
        rounding. are_set: user code has set the number of rows for this step, whose batches then do not count.
        """
        self._end_step()
        in_use = [known for known in self._kept if known.given and not known.was_judged and known.cut is None]
        for known in in_use:
            known.was_set |= are_set
            known.was_judged = known is not self._last
        if self._is_told:
            return False
        for known in in_use:
            if known.was_judged and not known.was_set:
                given = min(known.given, known.rows)
                if self._fraction is None:
                    self._fraction = given / known.rows
                self._is_told |= abs(given - self._fraction * known.rows) > 1
        return self._is_told

    def find_cut(self, tensors: Sequence[torch.Tensor]) -> Delivery | None:
        """Return the sharded batch of these tensors, or else the only one that has not been through a loop over its parts.

        Returns None if there is none, or if it could be one of several.
        """
        in_shards = [known for known in self._kept if known.cut is not None]
        places = [place for _, place in self._telling(tensors)]
        of_these = self._own.batches(*places) | self._seen.batches(*places)
        found = [known for known in in_shards if known in of_these]
        if not found:
            found = [known for known in in_shards if not known.was_used] or in_shards[-1:]
        if len(found) != 1:
            return None
        self._use(found[0])
        return found[0]

    def may_seed(self) -> bool:
        """Whether this thread trains, and computes no part of a batch: then its random numbers may begin anew for the next."""
        return self.trainer == threading.get_ident() and not self.is_in_loop

    def are_cut(self) -> bool:
        """Whether any of the recent batches is cut into shards."""
        return any(known.cut is not None for known in tuple(self._kept))

    def have_delivered(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of these tensors is of a batch as a loader has delivered it, and not of a list of parts."""
        batches = self._own.batches(*(place for _, place in self._telling(tensors)))
        return any(known.cut is None or not known.cut.is_divided for known in batches)

    def see(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a model is given these tensors without gradients."""
        if found := self._newest_first(self._own.batches(*(place for _, place in self._telling(tensors)))):
            self._skip_before(found[0])
            self._use(found[0])

    def are_of_several_loaders(self) -> bool:
        """Whether batches of several loaders may be in use at a time."""
        return len({known.loader for known in self._kept}) > 1

    def committed(self) -> None:
        """Note a commit, which counts everything delivered so far as processed."""
        self._end_step()
        for known in self._kept:
            known.was_counted = True

    def _end_step(self) -> None:
        for known in self._kept:
            known.is_over |= known.was_used

    def newest(self) -> Delivery | None:
        """Return the batch that was delivered last; None if there is none, or its step is over."""
        return self._kept[-1] if self._kept and not self._kept[-1].is_over else None

    def _use(self, used: Delivery) -> None:
        used.was_used = True
        self._last, self._is_fresh = used, False

    def _newest_first(self, batches: Collection[Delivery]) -> list[Delivery]:
        return [known for known in reversed(self._kept) if known in batches]

    def _skip_before(self, used: Delivery) -> None:
        """Count earlier batches of the same loader that no model was given as skipped."""
        for known in itertools.takewhile(lambda known: known is not used, self._kept):
            known.was_used |= known.loader == used.loader

    def _telling(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Place]]:
        """Return those tensors that are no constants, with their places."""
        placed = [(tensor, _place(tensor)) for tensor in tensors]
        return [(tensor, place) for tensor, place in placed if not self._constants.batches(place)]

    def _told_by(self, telling: Sequence[tuple[torch.Tensor, Place]]) -> Delivery | None:
        """Return the batch that tensors tell, if any. What came with another batch before becomes a constant."""
        own: set[Delivery] = set()
        # The batches of what models were given before, each with how many rows that has.
        seen: defaultdict[Delivery, set[int]] = defaultdict(set)
        new: set[int] = set()
        for tensor, place in telling:
            rows = {len(tensor)} if tensor.dim() else set()
            if batches := self._own.batches(place):
                own |= batches
            elif batches := self._seen.batches(place):
                for batch in batches:
                    seen[batch] |= rows
            else:
                new |= rows
        owners, older = self._newest_first(own), self._newest_first(seen.keys() - own)
        if not owners and not older:
            return None
        places = [place for _, place in telling]
        made = self._made.batches(*places)
        if owners:
            parts = [known for known in older if known not in made and known.rows in seen[known]]
            _check_alike([*owners, *parts], "a model was given rows of several batches at once")
            found: Delivery | None = owners[0]
        else:
            found = self._of_older(older, seen, new, made)
        if owners or found is None:
            for place in places:
                if self._seen.batches(place) - {found}:
                    self._seen.move(place, self._constants)
        if found is not None:
            self._skip_before(found)
        return found

    def _of_older(
        self, older: list[Delivery], seen: Mapping[Delivery, set[int]], new: set[int], made: set[Delivery]
    ) -> Delivery | None:
        """Find the batch of tensors that models were given or have made before, with ``older`` batches; None if it is another.

        new: how many rows tensors have that no model was given before. They may be those of a batch that was fetched since,
        converted, and the others what is given with every batch, or carried on from step to step. Or they are noise, for
        instance, that is given with an older batch, which is only so within a step.
        """
        found, unused = older[0], [known for known in self._kept if not known.was_used]
        rivals = [known for known in unused if known.rows in new]
        newest = {known.loader: known for known in self._kept}
        current = [known for known in older if newest[known.loader] is known]
        if current:
            _check_alike(current, "a model was given rows of several batches at once")
            return None if rivals and current[0].rows not in new else current[0]
        has_its_rows = found in made or found.rows in seen[found]
        if not rivals:
            # A table that a model is given by itself is given with the batch that was fetched last.
            return None if unused and self._is_fresh and not new and not has_its_rows else found
        if not found.is_over and has_its_rows and found.rows in new:
            _check_alike(
                [found, *rivals], "a model was given tensors of a batch together with what may be another batch"
            )
        return None

    def _guess(self, tensors: Sequence[torch.Tensor]) -> Delivery:
        """Find the batch among those that were fetched but not used yet, by its number of rows."""
        unused = [known for known in self._kept if not known.was_used]
        candidates = unused if self._is_fresh and unused else [*([self._last] if self._last else []), *unused]
        if len({known.weight for known in candidates}) > 1:
            rows = {tensor.size(0) for tensor in tensors if tensor.dim()}
            fitting = [known for known in candidates if known.rows in rows]
            candidates = fitting or candidates
        if not candidates:
            return self._kept[-1]
        if not self._is_fresh and len({known.loader for known in candidates}) == 1:
            return candidates[0]  # the last batch may go through models until another one is delivered
        _check_alike(
            candidates, "a model was given tensors that are not those of a batch, where several had been fetched"
        )
        return candidates[0]


def _check_alike(candidates: list[Delivery], what: str) -> None:
    shares = sorted({known.rank_rows for known in candidates})
    if len({known.weight for known in candidates}) > 1:
        raise final(
            DataError(
                f"{what}, and ranks have {' and '.join(map(str, shares))} rows of these: nobody can tell what its gradient "
                "weighs. Call the model once for each batch, with the batch's own tensors; or say what this rank's part weighs "
                "by model.set_rows(n) ahead of the call, with n = loader.batch_rows[rank] as it was when the batch was fetched"
            )
        )


def _place(tensor: torch.Tensor) -> Place:
    """Return a tensor's place. A loader may cut several batches from one storage."""
    try:
        values = tensor.values() if tensor.is_nested else tensor
        start = int(values.storage_offset()) * values.element_size()
        spans = (stride * (length - 1) for stride, length in zip(values.stride(), values.shape, strict=True) if length)
        end = start + int(sum(spans) + 1) * values.element_size()
        return Place(int(values.untyped_storage()._cdata), start, end)
    except (NotImplementedError, RuntimeError):  # sparse tensors, for example, have no storage
        return Place(id(tensor), 0, 1)


# The deliveries of the loaders in this process's state.
deliveries = Deliveries()
