"""Data-parallel training of small models: the effect of compression on step time, traffic and loss."""
