"""The runner's loop: head, stage, batching, and the channels between runners."""
