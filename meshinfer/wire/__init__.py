"""What crosses the network or a process boundary: messages, their codec, and the runners' frames. Pure."""
