"""Topics and subscriptions."""

from __future__ import annotations

import json
from typing import Any

from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import DOCUMENT, TAGS, TEXT, TEXTS, record


@provides
class Topic(Provider):
    """A topic."""

    type = "AWS::SNS::Topic"
    schema = record(DisplayName=TEXT, KmsMasterKeyId=TEXT, Tags=TAGS, TopicName=TEXT)
    replacing = frozenset({"TopicName"})
    attributes = frozenset({"TopicArn", "TopicName"})
    name_property = "TopicName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        made: str = place.client("sns").create_topic(Name=properties.get("TopicName") or place.name())["TopicArn"]
        self.update(place, made, properties, {})
        return made

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        client = place.client("sns")
        for name in ("DisplayName", "KmsMasterKeyId"):
            if properties.get(name, "") != before.get(name, ""):
                client.set_topic_attributes(TopicArn=physical_id, AttributeName=name, AttributeValue=properties.get(name, ""))
        wanted = place.tags(properties)
        present = client.list_tags_for_resource(ResourceArn=physical_id)["Tags"]
        stale = [tag["Key"] for tag in present if tag["Key"] not in wanted]
        if stale:
            client.untag_resource(ResourceArn=physical_id, TagKeys=stale)
        if wanted:
            client.tag_resource(ResourceArn=physical_id, Tags=[{"Key": key, "Value": value} for key, value in wanted.items()])

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("sns").delete_topic(TopicArn=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id if name == "TopicArn" else physical_id.rsplit(":", 1)[1]


@provides
class Subscription(Provider):
    """Who hears of a topic. Nothing is delivered outside the emulated account."""

    type = "AWS::SNS::Subscription"
    schema = record(Endpoint=TEXT, Protocol=TEXT, TopicArn=TEXT, required="Protocol TopicArn")
    replacing = frozenset({"Endpoint", "Protocol", "TopicArn"})
    attributes = frozenset({"Arn"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        made: str = place.client("sns").subscribe(ReturnSubscriptionArn=True, **properties)["SubscriptionArn"]
        return made

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("sns").unsubscribe(SubscriptionArn=physical_id)

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return physical_id


@provides
class TopicPolicy(Provider):
    """Who may publish to topics."""

    type = "AWS::SNS::TopicPolicy"
    schema = record(PolicyDocument=DOCUMENT, Topics=TEXTS, required="PolicyDocument Topics")
    replacing = frozenset({"Topics"})

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        self.update(place, "", properties, {})
        return place.name()

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        policy = json.dumps(properties["PolicyDocument"])
        for topic in properties["Topics"]:
            place.client("sns").set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=policy)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        """The policy goes with its topics; CloudFormation leaves it, too, when they stay."""
