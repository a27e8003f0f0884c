"""How bytes move between nodes: the interface that callers may rely on, libp2p behind it, TLS for activations."""
