"""On PYTHONPATH, this has processes of the ring be others: MUTANTS says which, by role."""

import dataclasses
import os

from headrace.roles import ROLES

for role, main in [rule.split("=") for rule in os.environ["MUTANTS"].split(",")]:
    ROLES[role] = dataclasses.replace(ROLES[role], main=f"mutants:{main}")
