"""Fetches the headless Chromium of the tests of the page, from npm's registry (68 MB) into .browser; needs npm and node."""

from __future__ import annotations

import shutil
import subprocess
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
FONTS = '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig><dir>{}</dir></fontconfig>'


def fetch() -> None:
    """Fetch it, unless it is there. What is in .browser is whole: it is moved there at the end."""
    if FETCHED.exists():
        return
    with tempfile.TemporaryDirectory(dir=FETCHED.parent) as name:
        folder = Path(name)
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (packed,) = folder.glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        subprocess.run(["node", "-e", UNPACK], cwd=folder, check=True)
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


if __name__ == "__main__":
    fetch()
