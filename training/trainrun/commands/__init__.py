"""One command a module: ``add_to(commands)`` adds its parser, whose ``act`` runs it and returns the exit code.

What needs torch is imported when a command runs, so that ``--help`` and the others are quick.
"""
