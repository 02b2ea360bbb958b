"""`python -m sglang.launch_server`."""

from simulated_engine.sglang import main

if __name__ == "__main__":
    main()
