"""How each runner mode drives a backend, eager and under CUDA graphs. One mode a file; the drives are shared."""
