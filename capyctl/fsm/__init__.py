"""The machines: one module each, their kernel in `table`, proofs in `proofs`, pages by `render`.

Nothing is re-exported: a command that needs an identity's type should not pay for building every table.
"""
