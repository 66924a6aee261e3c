"""Peak memory: the passes of XLA's CPU compiler, from the graph of a program to its buffers."""
