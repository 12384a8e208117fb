"""Kernels in C++ for CPUs, compiled for the machine that they run on. The sources are in `source`."""
