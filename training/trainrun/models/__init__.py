"""Models that come with trainrun."""
