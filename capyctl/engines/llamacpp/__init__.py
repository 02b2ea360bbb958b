"""llama.cpp: the `llama-server` binary, or the `xllamacpp` wheel behind our launcher."""
