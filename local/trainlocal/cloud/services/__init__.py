"""What moto's services lack and a training cluster needs: one module a subject, each with ``install()``.

They amend moto in this process only. ``install_all`` is called once, before the first request.
"""

from importlib import import_module

SUBJECTS = (
    "activities",
    "bucket_policies",
    "commands",
    "gateways",
    "images",
    "launches",
    "lifecycle",
    "lustre",
    "notifications",
    "placement_groups",
    "scaling",
    "schedule",
)
"""Modules of this package."""


def install_all() -> None:
    """Amends moto in this process; calling it again changes nothing."""
    for subject in SUBJECTS:
        import_module(f"{__name__}.{subject}").install()
