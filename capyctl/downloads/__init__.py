"""How models come to a host: what may be connected to, what is asked for, and how a download becomes a directory."""
