"""Transports: how bytes move from one rank to another."""
