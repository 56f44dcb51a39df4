"""Exact tokens and logprobs, from the engine to the loss."""
