"""Compiles the ``pyspark.zip`` from which Spark's Python processes import, when run as a script.

Spark puts this archive of sources ahead of the installed package. Python compiles what it imports from an archive again in each
process, which takes more than a second of each executor's first task and of each submitted script.
"""

from __future__ import annotations

import zipfile
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode, compile
from tempfile import TemporaryDirectory

import pyspark

ARCHIVE = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"


def main() -> None:
    """Add its compiled form to each source of the archive, except Spark's own tests, unless that was done before."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        names = set(archive.namelist())
        sources = [name for name in names if name.endswith(".py") and "/tests/" not in name]
        with TemporaryDirectory() as folder:
            archive.extractall(folder, sources)
            fresh = ARCHIVE.with_suffix(".fresh")
            fresh.write_bytes(ARCHIVE.read_bytes())
            with zipfile.ZipFile(fresh, "a", zipfile.ZIP_DEFLATED) as compiled:
                for name in sources:
                    if f"{name}c" not in names:
                        _add(compiled, name, Path(folder, name))
    fresh.replace(ARCHIVE)


def _add(archive: zipfile.ZipFile, name: str, source: Path) -> None:
    # The times of members are too coarse to compare a source's with: an archive's compiled modules are taken as they are.
    compiled = compile(
        str(source),
        cache_from_source(str(source)),
        name,
        doraise=True,
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
    )
    assert compiled is not None
    archive.write(compiled, f"{name}c")


if __name__ == "__main__":
    main()
