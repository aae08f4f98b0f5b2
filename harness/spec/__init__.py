"""The experiment file: its schema and how it is read."""

from harness.spec.load import check_spec, find_spec, load_spec
from harness.spec.schema import ExperimentSpec

__all__ = ["ExperimentSpec", "check_spec", "find_spec", "load_spec"]
