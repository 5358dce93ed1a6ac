"""Token datasets: their files, their cache on a node, their order, and the stream a loop reads."""
