"""Mistakes of user code that are refused before they train wrongly."""
