"""What a program will do, read off its jaxpr."""
