"""Arguments of a call, in mpi4py's forms, read once into a `Call`."""
