"""A plan computed word by word in NumPy, FP32: what every engine is judged by."""
