"""The reference stacks: what `app.py` deploys."""
