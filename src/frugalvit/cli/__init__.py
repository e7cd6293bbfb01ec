"""The command line: argv to a command, and the commands that fit in one file."""
