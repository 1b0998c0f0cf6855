"""Hundreds of small programs, their results on a real GPU, and the comparison with the emulation."""
