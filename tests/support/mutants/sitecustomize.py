"""On PYTHONPATH, this has processes of the ring be others: MUTANTS says which, by role.

Ceilings are lower, so that tests can pass them. A supervisor that is `tireless` never gives up.
"""

import dataclasses
import os

from headrace import restarts
from headrace.ceilings import SHARES
from headrace.machine import memory_limit
from headrace.roles import ROLES
from headrace.toil import CEILINGS_S

for role, main in [rule.split("=") for rule in os.environ["MUTANTS"].split(",")]:
    if main == "tireless":
        restarts.DELAYS_S = (0.1,) * 1_000_000
    else:
        ROLES[role] = dataclasses.replace(ROLES[role], main=f"mutants:{main}")
SHARES["detokenizer"] = (400 << 20) / memory_limit()
CEILINGS_S["detokenizer"] = 1.0
