"""TensorFold: a Python environment whose kernels are built on the machine, on their first use."""
