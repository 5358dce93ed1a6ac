"""Our own CloudFormation: templates, change sets, stacks, events, rollback.

moto's engine skips the resource types that it does not know, deletes without order and records no events; this one fails
by name what it cannot do. It knows nothing of any AWS service: the resource types come from ``trainlocal.cloud.resources``.
"""
