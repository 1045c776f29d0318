"""What driver, tasks and workers tell each other, and how. Imports neither torch nor pyspark."""
