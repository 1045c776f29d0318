"""Checks for mistakes in user code, which raise before the mistakes spoil the training."""
