"""`python -m benchmarks`: every measurement, one after the other."""

from benchmarks import relay

if __name__ == "__main__":
    relay.main()
