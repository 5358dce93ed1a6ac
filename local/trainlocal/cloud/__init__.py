"""The emulated AWS: moto server, what it lacks (``services``), and our own CloudFormation (``formation``, ``resources``)."""
