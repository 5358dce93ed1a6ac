"""How one model computes on many ranks. All strategies take the same steps on the same data."""
