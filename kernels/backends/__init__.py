"""Which of several implementations computes an operation, and why."""
