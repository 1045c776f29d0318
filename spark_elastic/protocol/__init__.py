"""The messages between driver, tasks and workers, and the records of the event log. Imports neither torch nor pyspark."""
