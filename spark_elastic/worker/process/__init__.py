"""A worker's process, from the fork of one that has imported torch to the end of the user's function."""
