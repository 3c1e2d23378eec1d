"""On PYTHONPATH, this replaces processes of the ring by others: MUTANTS names them, by role.

Ceilings of detokenizers that are others are lower, so that tests can pass them. A supervisor that
is `tireless` never gives up.
"""

import dataclasses
import os

from headrace.runtime.roles import ROLES
from headrace.supervision import restart_backoff
from headrace.supervision.watchdog import CEILINGS_S, MEMORY_SHARES
from headrace.system.machine import memory_limit

rules = dict(rule.split("=") for rule in os.environ["MUTANTS"].split(","))
if rules.pop("supervisor", None) == "tireless":
    restart_backoff.DELAYS_S = (0.1,) * 1_000_000
for role, main in rules.items():
    ROLES[role] = dataclasses.replace(ROLES[role], main=f"mutants:{main}")
if "detokenizer" in rules:
    MEMORY_SHARES["detokenizer"] = ((400 << 20) + 0.5) / memory_limit()  # a product rounds down
    CEILINGS_S["detokenizer"] = 1.0
