"""The benchmarks: OSU names, flags and output, with every result verified."""
