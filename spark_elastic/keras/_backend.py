"""Chooses Keras' backend, before the first import of Keras."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

if keras.backend.backend() != "torch":
    raise ImportError(f"spark_elastic.keras needs KERAS_BACKEND=torch, not {keras.backend.backend()}")
