"""Adapters that put imported tensors into an engine."""
