"""Contenders that are not ours: gloo, and compression per message.

`Gloo(comm)`, `PerMessage(comm, codec)` and `PerMessageChain(comm, codec)` have one shape. All ranks of an MPI
communicator make one; its methods are collectives on numpy arrays, contiguous and of the same length on all ranks;
`close()`, or the end of a `with` block, is collective too.

    bcast(array, root=0)        the root's array reaches all
    allreduce(send, recv)       sums; `recv` may be `send`
    allgather(send, recv)       `recv` is as many times longer as there are ranks

Gloo has reduce, reduce_scatter, alltoall, gather and scatter besides.
"""

from osu_bench.rivals.gloo import Gloo
from osu_bench.rivals.p2p import PerMessage, PerMessageChain

__all__ = ["Gloo", "PerMessage", "PerMessageChain"]
