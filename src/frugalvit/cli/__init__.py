"""The command line, and the commands that fit in one file."""
