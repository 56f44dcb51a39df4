"""Device code in Triton. Importing it imports Triton, so only `triton_library` does, at the first call."""
