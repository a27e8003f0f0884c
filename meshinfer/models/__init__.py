"""What can be run: the store of models on this node, and where models come from."""
