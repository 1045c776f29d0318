"""Hypothesis judges what the code does, not how fast the machine is: that is for benchmarks/."""

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
