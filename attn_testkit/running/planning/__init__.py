"""What is asked for, and what will be done: no process, nothing driven."""
