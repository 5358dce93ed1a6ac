"""Alarms on metrics, and dashboards."""

from __future__ import annotations

from typing import Any

from trainlocal.cloud.resources.api_shape import api_shape
from trainlocal.cloud.resources.provider import Place, Provider, provides
from trainlocal.cloud.resources.schema import FLAG, NUMBER, TAGS, TEXT, TEXTS, WHOLE, Kind, Many, record


class _MetricQueries(Kind):
    """The list of metric queries of an alarm, as the API describes one."""

    def faults(self, node: Any, path: str) -> Any:
        return Many(api_shape("cloudwatch", "MetricDataQuery")).faults(node, path)

    def convert(self, value: Any, path: str) -> Any:
        return Many(api_shape("cloudwatch", "MetricDataQuery")).convert(value, path)


@provides
class Alarm(Provider):
    """An alarm on one metric. moto keeps it and does not judge the metric."""

    type = "AWS::CloudWatch::Alarm"
    schema = record(
        ActionsEnabled=FLAG,
        AlarmActions=TEXTS,
        AlarmDescription=TEXT,
        AlarmName=TEXT,
        ComparisonOperator=TEXT,
        DatapointsToAlarm=WHOLE,
        Dimensions=Many(record(Name=TEXT, Value=TEXT, required="Name Value")),
        EvaluationPeriods=WHOLE,
        ExtendedStatistic=TEXT,
        InsufficientDataActions=TEXTS,
        MetricName=TEXT,
        Metrics=_MetricQueries(),
        Namespace=TEXT,
        OKActions=TEXTS,
        Period=WHOLE,
        Statistic=TEXT,
        Tags=TAGS,
        Threshold=NUMBER,
        TreatMissingData=TEXT,
        Unit=TEXT,
        required="ComparisonOperator EvaluationPeriods",
    )
    replacing = frozenset({"AlarmName"})
    attributes = frozenset({"Arn"})
    name_property = "AlarmName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name: str = properties.get("AlarmName") or place.name()
        self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        request = {name: value for name, value in properties.items() if name not in ("AlarmName", "Tags")}
        tags = [{"Key": key, "Value": value} for key, value in place.tags(properties).items()]
        place.client("cloudwatch").put_metric_alarm(AlarmName=physical_id, Tags=tags, **request)

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("cloudwatch").delete_alarms(AlarmNames=[physical_id])

    def attribute(self, place: Place, physical_id: str, properties: dict[str, Any], name: str) -> Any:
        return place.arn("cloudwatch", f"alarm:{physical_id}")


@provides
class Dashboard(Provider):
    """A page of charts."""

    type = "AWS::CloudWatch::Dashboard"
    schema = record(DashboardBody=TEXT, DashboardName=TEXT, required="DashboardBody")
    replacing = frozenset({"DashboardName"})
    name_property = "DashboardName"

    def create(self, place: Place, properties: dict[str, Any]) -> str:
        name: str = properties.get("DashboardName") or place.name()
        self.update(place, name, properties, {})
        return name

    def update(self, place: Place, physical_id: str, properties: dict[str, Any], before: dict[str, Any]) -> None:
        place.client("cloudwatch").put_dashboard(DashboardName=physical_id, DashboardBody=properties["DashboardBody"])

    def delete(self, place: Place, physical_id: str, properties: dict[str, Any]) -> None:
        place.client("cloudwatch").delete_dashboards(DashboardNames=[physical_id])
