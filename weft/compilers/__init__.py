"""Ahead-of-time compilation with the vendors' compilers: what will run on a TPU or GPU, without one."""
