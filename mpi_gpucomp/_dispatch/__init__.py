"""From a `Call` to a `Plan`, and from a plan to a running collective."""
