"""A stand-in of a Kubernetes cluster, for Spark's own Kubernetes back end: pods are processes of this machine."""

from kube.cluster import Kubernetes

__all__ = ["Kubernetes"]
