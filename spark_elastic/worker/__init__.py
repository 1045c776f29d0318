"""The code that runs in a training process: around user code, and called by it."""
