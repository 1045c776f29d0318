"""What happened to a job, read from its event log: for people as a page, a picture or a table, for programs as facts."""

from spark_elastic.timeline.notebook import Timeline as Timeline

__all__ = ["Timeline"]
