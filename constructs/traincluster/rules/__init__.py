"""What can go wrong with a cluster, known before a deploy. Importing this package registers every rule."""

from traincluster.rules import capacity, ending, identity, image, job, launcher, lustre, network, software, storage, user_data
from traincluster.rules.engine import Rule, check, find_rule, rule, rules
from traincluster.rules.finding import Finding, Level

MODULES = (capacity, ending, identity, image, job, launcher, lustre, network, software, storage, user_data)
"""Where the rules are."""

__all__ = ["MODULES", "Finding", "Level", "Rule", "check", "find_rule", "rule", "rules"]
