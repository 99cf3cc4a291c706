"""A cluster on one machine: hosts that are network namespaces, joined by links of a chosen rate that can be cut."""

from osu_bench.cluster.cluster import Cluster
from osu_bench.cluster.launch import Running
from osu_bench.cluster.network import Link
from osu_bench.cluster.system import ClusterError

__all__ = ["Cluster", "ClusterError", "Link", "Running"]
