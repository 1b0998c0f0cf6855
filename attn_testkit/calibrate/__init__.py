"""What a real GPU answered to hundreds of small programs, those programs, and the comparison with the emulation."""
