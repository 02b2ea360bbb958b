"""The simulated engines: real programs with each family's command line, routes, dialect, memory and faults.

Standard library only; copied into each installation that a test lays out, so nothing here imports CapyCTL.
"""
