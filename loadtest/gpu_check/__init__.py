"""What only a GPU can show, in one go of a few minutes: `scripts/gpu_check.sh`."""
