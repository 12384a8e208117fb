"""Process 1..A: HTTP in, text out. asyncio; imports neither torch nor transformers."""
