"""What happened to a job, read from its event log: as a page, a picture or a table for people, as facts for programs."""

from spark_elastic.timeline.notebook import Timeline as Timeline

__all__ = ["Timeline"]
