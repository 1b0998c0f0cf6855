"""Answers of a real GPU to hundreds of small programs, the programs, and the comparison with the emulation."""
