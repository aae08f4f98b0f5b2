"""What an experiment will do and cost, before anything runs."""

from harness.plan.describe import describe
from harness.plan.make import make_plan
from harness.plan.value import Plan

__all__ = ["Plan", "describe", "make_plan"]
