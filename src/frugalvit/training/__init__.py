"""A task (a backbone and its objectives), one loop that trains every task, and the folder a run lives in."""
