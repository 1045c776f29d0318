"""Decodes PNG and JPEG images, with OpenCV if it is installed (as Petastorm does), else with Pillow."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import numpy as np

from spark_elastic.errors import DataError


def decode_image(data: bytes) -> np.ndarray:
    """Return an image as [height, width], or [height, width, 3] in RGB. Raises DataError or ValueError."""
    return _decoder()(data)


@functools.cache
def _decoder() -> Callable[[bytes], np.ndarray]:
    try:
        import cv2  # noqa: F401

        return _with_opencv
    except ImportError:
        pass
    try:
        import PIL.Image  # noqa: F401

        return _with_pillow
    except ImportError:
        raise DataError("images need opencv-python-headless or pillow: pip install one of them") from None


def _with_opencv(data: bytes) -> np.ndarray:
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ValueError("not an image that OpenCV knows")
    if image.ndim == 3:
        return np.ascontiguousarray(image[:, :, [2, 1, 0]])
    return np.asarray(image)


def _with_pillow(data: bytes) -> np.ndarray:
    import PIL.Image

    with PIL.Image.open(io.BytesIO(data)) as image:
        if image.format == "PNG" and data[24] == 16 and data[25] != 0:
            raise DataError(
                "Pillow cannot read 16-bit colour png images without loss: pip install opencv-python-headless"
            )
        if image.mode == "P":
            return np.asarray(image.convert("RGB"))
        array = np.asarray(image)
    return array.astype(np.uint16) if array.dtype == np.int32 else array
