"""Shipped fakes for deterministic simulation: a network, phantom topologies, an exact engine."""
