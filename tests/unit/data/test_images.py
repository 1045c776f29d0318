"""Images come as arrays in RGB, whichever library decodes them."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from spark_elastic.data import images
from spark_elastic.data.images import decode_image
from spark_elastic.errors import DataError

COLOURS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [10, 20, 30]], [[1, 2, 3], [4, 5, 6]]], np.uint8)


@pytest.fixture(params=["cv2", "PIL"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have this library be the only one."""
    pytest.importorskip(request.param)
    if request.param == "PIL":
        monkeypatch.setitem(sys.modules, "cv2", None)
    images._decoder.cache_clear()
    yield request.param
    images._decoder.cache_clear()


def png(array: np.ndarray, palette: np.ndarray | None = None) -> bytes:
    """Write an image, or indexes of a palette, as the format says, which needs neither library."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    colour = 3 if palette is not None else 2 if array.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 8 * array.itemsize, colour, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(row.dtype.newbyteorder(">")).tobytes() for row in array)
    colours = chunk(b"PLTE", palette.tobytes()) if palette is not None else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + colours
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "array", [COLOURS, COLOURS[:, :, 0], COLOURS[:, :, 0].astype(np.uint16) * 257], ids=["RGB", "grey", "16-bit grey"]
)
def test_an_image_is_decoded_as_it_was(array: np.ndarray) -> None:
    decoded = decode_image(png(array))
    assert decoded.dtype == array.dtype
    assert decoded.tolist() == array.tolist()


@pytest.mark.usefixtures("library")
def test_a_palette_is_made_into_its_colours() -> None:
    palette, indexes = COLOURS.reshape(-1, 3), np.array([[5, 0, 2], [1, 4, 3]], np.uint8)
    assert decode_image(png(indexes, palette)).tolist() == palette[indexes].tolist()


@pytest.mark.usefixtures("library")
def test_what_is_no_image_is_an_error_of_the_value() -> None:
    with pytest.raises((ValueError, OSError), match="image"):
        decode_image(b"no image at all")


def test_without_a_library_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cv2", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    images._decoder.cache_clear()
    with pytest.raises(DataError, match="images need opencv-python-headless or pillow: pip install one of them"):
        decode_image(b"")
    images._decoder.cache_clear()
