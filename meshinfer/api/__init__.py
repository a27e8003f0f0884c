"""The front door: HTTP in the protocols that clients already speak."""
