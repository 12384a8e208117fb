"""CUDA graphs: which steps run from captured graphs, and the graphs themselves."""
