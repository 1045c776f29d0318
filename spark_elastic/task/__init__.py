"""The part that runs in a Spark task: it registers as a host, and starts and supervises a training worker."""
