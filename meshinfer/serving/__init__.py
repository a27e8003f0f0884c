"""Requests become tokens: election, leases and lifecycle of instances, sessions, text."""
