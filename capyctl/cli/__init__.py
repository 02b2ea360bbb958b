"""The commands. One module per noun; each parses, calls one function and prints."""
