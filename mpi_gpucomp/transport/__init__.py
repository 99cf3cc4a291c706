"""The ways in which bytes get from one rank to another."""
