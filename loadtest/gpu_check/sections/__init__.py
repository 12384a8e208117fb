"""A module for each section of the check; see `loadtest.gpu_check.child.SectionModule`."""
