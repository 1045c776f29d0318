"""What driver, tasks and workers tell each other, and how, and what the event log records. Imports neither torch nor pyspark."""
