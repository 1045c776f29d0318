"""Images come as arrays in RGB, whichever library decodes them."""

from __future__ import annotations

import io
import sys
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


def png(array: np.ndarray, mode: str | None = None) -> bytes:
    image = pytest.importorskip("PIL.Image").fromarray(array)
    written = io.BytesIO()
    (image.convert(mode) if mode else image).save(written, "PNG")
    return written.getvalue()


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
    flat = np.repeat(COLOURS[:1], 4, 0)
    assert decode_image(png(flat, "P")).shape == (4, 2, 3)


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
