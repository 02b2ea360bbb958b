"""The messages between a server and a host, their codec, and the channels that carry them."""
