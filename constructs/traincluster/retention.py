"""How long logs are kept."""

from __future__ import annotations

from aws_cdk import aws_logs as logs

_DAYS = {
    1: logs.RetentionDays.ONE_DAY,
    3: logs.RetentionDays.THREE_DAYS,
    5: logs.RetentionDays.FIVE_DAYS,
    7: logs.RetentionDays.ONE_WEEK,
    14: logs.RetentionDays.TWO_WEEKS,
    30: logs.RetentionDays.ONE_MONTH,
    60: logs.RetentionDays.TWO_MONTHS,
    90: logs.RetentionDays.THREE_MONTHS,
    120: logs.RetentionDays.FOUR_MONTHS,
    150: logs.RetentionDays.FIVE_MONTHS,
    180: logs.RetentionDays.SIX_MONTHS,
    365: logs.RetentionDays.ONE_YEAR,
    400: logs.RetentionDays.THIRTEEN_MONTHS,
    545: logs.RetentionDays.EIGHTEEN_MONTHS,
    731: logs.RetentionDays.TWO_YEARS,
}


def retention_of(days: int, *, setting: str) -> logs.RetentionDays:
    """CloudWatch's retention of so many days, of which it knows a few only.

    Raises:
        ValueError: it does not know this one; the message names the setting.
    """
    if days not in _DAYS:
        raise ValueError(f"{setting} is {days}. Allowed by CloudWatch: {', '.join(map(str, _DAYS))}.")
    return _DAYS[days]
