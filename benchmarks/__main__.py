"""`python -m benchmarks`: every measurement, one after the other."""

from benchmarks import cli_start, park, planning, relay, switch

if __name__ == "__main__":
    for measurement in (planning, relay, cli_start, switch, park):
        measurement.main()
