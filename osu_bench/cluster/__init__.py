"""A cluster on one machine: hosts that are network namespaces, joined by links of a chosen rate that can be cut."""

from osu_bench.cluster.cluster import Cluster
from osu_bench.cluster.errors import ClusterError
from osu_bench.cluster.links import Link
from osu_bench.cluster.running import Running

__all__ = ["Cluster", "ClusterError", "Link", "Running"]
