"""vLLM: Python environments that hold the vllm package, started by our protected entry."""
