"""Continuous-batching generation: requests in, tokens out."""
