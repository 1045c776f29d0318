"""Draws the pictures of docs/architecture.md from the code: ``python docs/make_pictures.py``.

docs/rooms.svg shows the package's folders. Each stands above all that it imports; arrows that follow from others are left out.
docs/phases.svg shows the tables of ``spark_elastic.driver.phases``: the way on above the phases, the ways back below them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from textwrap import wrap
from typing import Any

from spark_elastic.driver import phases

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "spark_elastic"
# The process that a room's code runs in, by the colour of its box. All others are libraries of several.
COLORS = {"driver": "#cfe0f5", "launchers": "#cfe0f5", "task": "#f9e0b8", "worker": "#cfe9cf"}
LIBRARY = "#eeeeee"
WIDTH, HEIGHT, GAP, FLOOR, CHARACTERS = 190, 74, 22, 128, 30

# Of a phase's box, the space between two, and how much higher an arc is for each box that it passes.
BOX, SPACE, RISE = 124, 44, 44

Arrows = dict[str, set[str]]

BACKGROUND = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#667"/></marker></defs>\n<rect width="100%" height="100%" fill="#fff"/>'
)


def read_rooms() -> dict[str, str]:
    """The package's folders, each with the first sentence of its docstring."""
    found = {}
    for path in sorted(PACKAGE.glob("*/__init__.py")):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.parent.name] = words.split("\n\n")[0].split(". ")[0].rstrip(".").replace("``", "")
    return found


def read_arrows(rooms: Mapping[str, str]) -> Arrows:
    """Which rooms each room imports, also inside functions."""
    arrows: Arrows = {room: set() for room in rooms}
    for room in rooms:
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
                for name in names:
                    package, _, rest = name.partition(".")
                    if package == PACKAGE.name and rest.split(".")[0] in rooms:
                        arrows[room].add(rest.split(".")[0])
        arrows[room].discard(room)
    return arrows


def place_on_floors(arrows: Arrows) -> dict[str, int]:
    """Put each room one floor above the highest that it imports. Raises ``ValueError`` where rooms import each other."""
    floors: dict[str, int] = {}

    def place(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError(f"rooms import each other: {' > '.join([*above[above.index(room) :], room])}")
        if room not in floors:
            floors[room] = max((place(other, (*above, room)) + 1 for other in sorted(arrows[room])), default=0)
        return floors[room]

    for room in arrows:
        place(room, ())
    return floors


def reduce(arrows: Arrows) -> Arrows:
    """Leave out arrows to what is reached by way of another room anyway."""

    def reached(room: str) -> set[str]:
        return arrows[room].union(*(reached(other) for other in arrows[room]))

    return {
        room: {other for other in direct if not any(other in reached(third) for third in direct - {other})}
        for room, direct in arrows.items()
    }


def draw_rooms() -> str:
    """The package's folders as SVG."""
    rooms = read_rooms()
    arrows = read_arrows(rooms)
    floors = place_on_floors(arrows)
    top = max(floors.values())
    rows = [[room for room in rooms if floors[room] == floor] for floor in range(top, -1, -1)]
    widest = max(len(row) for row in rows)
    total = widest * (WIDTH + GAP) + GAP
    places = {
        room: (
            (total - len(row) * (WIDTH + GAP) + GAP) / 2 + column * (WIDTH + GAP),
            GAP + FLOOR * number,
        )
        for number, row in enumerate(rows)
        for column, room in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {FLOOR * top + HEIGHT + 2 * GAP}" '
        'font-family="sans-serif" font-size="12">',
        BACKGROUND,
    ]
    for room, others in reduce(arrows).items():
        for other in sorted(others):
            (left, upper), (there, lower) = places[room], places[other]
            parts.append(
                f'<line x1="{left + WIDTH / 2:g}" y1="{upper + HEIGHT}" x2="{there + WIDTH / 2:g}" y2="{lower}" '
                'stroke="#667" marker-end="url(#tip)"/>'
            )
    for room, (left, upper) in places.items():
        middle = left + WIDTH / 2
        color = COLORS.get(room, LIBRARY)
        parts += [
            f'<rect x="{left:g}" y="{upper}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{color}" fill-opacity="0.85" '
            'stroke="#667"/>',
            f'<text x="{middle:g}" y="{upper + 18}" text-anchor="middle" font-weight="bold">{room}/</text>',
        ]
        for number, line in enumerate(wrap(rooms[room], CHARACTERS)[:3]):
            parts.append(
                f'<text x="{middle:g}" y="{upper + 35 + 14 * number}" text-anchor="middle" font-size="11">{line}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def draw_phases() -> str:
    """The tables of phases as SVG, that of a world above that of a worker."""
    tables: list[tuple[str, type[Enum], Mapping[Any, Enum]]] = [
        ("A world", phases.WorldPhase, phases.WORLD),
        ("A worker", phases.WorkerPhase, phases.WORKER),
    ]
    parts, top, width = [], 0, 0
    for title, kind, table in tables:
        order = list(kind)
        ways: dict[tuple[int, int], list[str]] = {}
        for (phase, change), then in table.items():
            ways.setdefault((order.index(phase), order.index(then)), []).append(change.name)
        above = RISE * max(there - here for here, there in ways) + 30
        below = RISE * max([1, *(here - there for here, there in ways)])
        parts.append(f'<text x="16" y="{top + 24}" font-weight="bold" font-size="14">{title}</text>')
        for (here, there), names in ways.items():
            parts += _arc(here, there, top + above, names)
        for number, phase in enumerate(order):
            left, middle = SPACE + number * (BOX + SPACE), top + above + 22
            parts += [
                f'<rect x="{left}" y="{top + above}" width="{BOX}" height="34" rx="6" fill="#cfe0f5" stroke="#667"/>',
                f'<text x="{left + BOX / 2:g}" y="{middle}" text-anchor="middle" font-weight="bold">{phase.name}</text>',
            ]
        top += above + 34 + below
        width = max(width, SPACE + len(order) * (BOX + SPACE))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, BACKGROUND, *parts, "</svg>", ""])


def _arc(here: int, there: int, top: int, names: list[str]) -> list[str]:
    """An arrow between two boxes of a row, above it where it goes on, below it where it goes back or stays."""
    start, end = (SPACE + place * (BOX + SPACE) + BOX / 2 for place in (here, there))
    start, end = (start + 14, end - 14) if there > here else (start - 14, end + 14)
    edge, rise = (top, -RISE * (there - here)) if there > here else (top + 34, RISE * max(here - there, 1))
    middle = (start + end) / 2
    # A cubic curve reaches three quarters of the way to its handles.
    handle = edge + rise * 4 / 3 * 0.8
    label = ", ".join(names)
    return [
        f'<path d="M{start:g},{edge} C{start:g},{handle:.1f} {end:g},{handle:.1f} {end:g},{edge}" fill="none" stroke="#667" '
        'marker-end="url(#tip)"/>',
        f'<text x="{middle:g}" y="{edge + rise * 0.8 + (-4 if rise < 0 else 13):.1f}" text-anchor="middle" font-size="10" '
        f'fill="#334">{label}</text>',
    ]


PICTURES = {"rooms.svg": draw_rooms, "phases.svg": draw_phases}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
