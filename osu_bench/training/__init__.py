"""Small models trained on several ranks, to see what compression does to time, traffic and loss."""
