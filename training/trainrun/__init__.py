"""trainrun: what runs on the nodes of a training cluster, and on any torchrun machine."""

__version__ = "0.1.0"
