"""Fetches the headless Chromium of the tests of the page, from npm's registry (68 MB) into .browser; needs npm and node."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from browser import FETCHED

# It brings the libraries that Chromium needs besides those of any Linux. Its files are packed by brotli, which node reads.
PACKAGE = "@sparticuz/chromium@147.0.0"
UNPACK = """
const fs = require("fs"), zlib = require("zlib");
for (const name of ["chromium", "al2023.tar", "fonts.tar"])
  fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync(`package/bin/${name}.br`)));
"""
# npm would try for long where there is no network.
FETCH_SECONDS = 120
FONTS = '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig><dir>{}</dir></fontconfig>'


def fetch() -> None:
    """Fetch it, unless it is there; raises what goes wrong. What is in .browser is whole: it is moved there at the end."""
    if FETCHED.exists():
        return
    with tempfile.TemporaryDirectory(dir=FETCHED.parent, prefix=".browser-") as name:
        folder = Path(name)
        _run(folder, "npm", "pack", "--silent", "--fetch-retries=0", PACKAGE)
        (packed,) = folder.glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        _run(folder, "node", "-e", UNPACK)
        made = folder / "made"
        made.mkdir()
        with tarfile.open(folder / "al2023.tar") as archive:
            archive.extractall(made, filter="data")  # lib/
        with tarfile.open(folder / "fonts.tar") as archive:
            archive.extractall(made / "fonts", filter="data")
        (made / "fonts" / "fonts.conf").write_text(FONTS.format(FETCHED / "fonts"))
        shutil.move(folder / "chromium", made / "chromium")
        (made / "chromium").chmod(0o755)
        made.rename(FETCHED)


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=FETCH_SECONDS)


def main() -> None:
    """Fetch it, or exit with a sentence on what went wrong."""
    for command in ("npm", "node"):
        if shutil.which(command) is None:
            sys.exit(f"No browser was fetched: {command} is not installed.")
    try:
        fetch()
    except subprocess.SubprocessError as error:
        why = f"took longer than {FETCH_SECONDS} s" if isinstance(error, subprocess.TimeoutExpired) else "failed"
        sys.exit(f"No browser was fetched: {' '.join(error.cmd[:2])} {why}.")
    except Exception as error:
        sys.exit(f"No browser was fetched: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
