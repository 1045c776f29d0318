"""What runs in a training process: the code around the user's function, and the code that this function calls."""
