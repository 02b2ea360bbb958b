"""What the families that live in Python environments share: vLLM, SGLang, TensorFold."""
