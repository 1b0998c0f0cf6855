"""Planning: a request and the plan that follows from it. Starts no process and runs no case."""
