"""Clusters for tests: one in the test's own loop, and one as a process that can be killed."""

from cepheid_testkit.process_cluster import ProcessCluster
from cepheid_testkit.standalone_cluster import StandaloneCluster

__all__ = ["ProcessCluster", "StandaloneCluster"]
