"""Ids, units and errors: what every room may use."""
