"""Nothing that a job decides depends on the wall clock, which may jump: the package asks it only where these lines say why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "spark_elastic"
# What tells, or depends on, the time of day, by the module that has it.
WALL_CLOCK = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "asctime", "CLOCK_REALTIME"},
    "datetime": {"now", "utcnow", "today"},
}
WHY = {
    "driver/event_log.py": "events say when they happened",
    "protocol/credentials.py": "a certificate has to have dates; none is looked at",
    "worker/scripts.py": "files that have changed since then are told by the times that their file system gives them",
    "estimator/files.py": "where a store does not tell when a file was written",
    "estimator/dataset.py": "files that nobody has written to for a day are told by the times that their store gives them",
    "estimator/temporary_store.py": "folders without a lock for a day are told by the times that the file system gives them",
    "timeline/server.py": "how long a log has been silent is told by the time at which its file was written to",
}


def test_the_package_asks_the_wall_clock_only_where_it_must() -> None:
    modules = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name for name, tree in modules.items() if any(_asks(tree))} == set(WHY)


def test_whoever_asks_it_is_seen() -> None:
    for line in (
        "import time as t\nt.time()", "from time import time", "from datetime import datetime as d\nd.now()",
        "import datetime\ndatetime.datetime.now()", "import time\nf(clock=time.time)",
        "import time\ntime.clock_gettime(time.CLOCK_REALTIME)",
    ):  # fmt: skip
        assert any(_asks(ast.parse(line))), line
    for line in ("import time\ntime.monotonic()", "from datetime import timedelta\ntimedelta(1)"):
        assert not any(_asks(ast.parse(line))), line


def _asks(tree: ast.AST) -> Iterator[bool]:
    """Yield for each name of a module's, and for each attribute of such a name, whether it is the wall clock's."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in WALL_CLOCK}
        elif isinstance(node, ast.ImportFrom) and node.module in WALL_CLOCK:
            yield any(alias.name in WALL_CLOCK[node.module] for alias in node.names)
            aliases |= {alias.asname or alias.name: node.module for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.value if isinstance(node.value, ast.Attribute) else node.value
            if isinstance(owner, ast.Name) and owner.id in aliases:
                yield node.attr in WALL_CLOCK[aliases[owner.id]]
