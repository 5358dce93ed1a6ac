"""The node agent: what turns a booted instance into a training node, and what keeps the job going on it.

Standard library and boto3 only; torch runs in the ranks, never in the agent.
"""
