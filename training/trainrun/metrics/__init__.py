"""Where the numbers of a run go. The names are the same in every sink."""
