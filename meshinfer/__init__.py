"""meshinfer: the laptops in the room become one model server."""

__version__ = "0.1.0"
