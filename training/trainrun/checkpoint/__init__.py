"""Checkpoints: what is saved (tensors), how it lies in a store (layout), and how it gets there and back."""
