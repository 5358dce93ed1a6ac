"""What can go wrong with a cluster, known before a deploy. Importing this package registers every rule."""

from traincluster.rules.engine import Rule, check, find_rule, rule, rules
from traincluster.rules.finding import Finding, Level

__all__ = ["Finding", "Level", "Rule", "check", "find_rule", "rule", "rules"]
