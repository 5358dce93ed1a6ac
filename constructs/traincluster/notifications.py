"""A topic on which people hear how runs end."""

from __future__ import annotations

import re

from aws_cdk import RemovalPolicy, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions

from constructs import Construct

_EMAIL = re.compile(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+")


class NotificationTopic(sns.Topic):
    """An encrypted topic that takes requests over TLS only, and sends what it gets to an e-mail address.

    The key is the customer's, for about a dollar a month: CloudWatch's alarms cannot publish to a topic that is encrypted by the
    key that AWS manages, since nobody can let them use that one. SNS asks the address to confirm before it sends anything.

    Example:
        >>> NotificationTopic(stack, "Topic", email="someone@example.com")                # doctest: +SKIP
    """

    def __init__(self, scope: Construct, construct_id: str, *, email: str) -> None:
        """Make the topic.

        Args:
            scope: where the construct goes.
            construct_id: its id there.
            email: who is told.

        Raises:
            ValueError: no e-mail address.
        """
        check_email(email)
        self.encryption_key = kms.Key(
            scope,
            f"{construct_id}Key",
            description="Messages about training runs",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,
        )
        super().__init__(scope, construct_id, master_key=self.encryption_key, enforce_ssl=True)
        account = Stack.of(scope).account
        alarms = iam.ServicePrincipal("cloudwatch.amazonaws.com")
        self.encryption_key.add_to_resource_policy(
            iam.PolicyStatement(
                sid="LetAlarmsPublish",
                principals=[alarms],
                actions=["kms:Decrypt", "kms:GenerateDataKey"],
                resources=["*"],
                conditions={"StringEquals": {"aws:SourceAccount": account}},
            )
        )
        self.add_subscription(subscriptions.EmailSubscription(email))


def check_email(email: str) -> None:
    """Raises:
    ValueError: this is no e-mail address.
    """
    if not _EMAIL.fullmatch(email):
        raise ValueError(f"notify is {email!r}. Give an e-mail address, such as 'someone@example.com'.")


def let_publish(role: iam.Role, topic: sns.ITopic) -> None:
    """Let a node publish to a topic, and use the topic's key if it is one of ours."""
    role.add_to_policy(iam.PolicyStatement(sid="Notify", actions=["sns:Publish"], resources=[topic.topic_arn]))
    if isinstance(topic, NotificationTopic):
        topic.encryption_key.grant(role, "kms:Decrypt", "kms:GenerateDataKey")
