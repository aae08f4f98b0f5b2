"""Which reference vectors a test names; one that nothing names is a gap that must be declared."""

from __future__ import annotations

import json
from pathlib import Path

TESTS = Path(__file__).parent.parent

# Vectors of methods that no shipped arm, metric or account uses yet. Ship one, and its vectors
# leave this list for a test of their own.
NOT_YET_SHIPPED: dict[str, str] = {}


def test_every_vector_is_tested_or_declared_open():
    vectors = json.loads((TESTS / "golden/vectors.json").read_text())["vectors"]
    names = {v["name"] for v in vectors}
    sources = [p.read_text() for p in TESTS.rglob("test_*.py") if p != Path(__file__)]
    named = {name for name in names if any(f'"{name}"' in source for source in sources)}
    assert NOT_YET_SHIPPED.keys() <= names, "a vector declared open does not exist"
    missing = sorted(names - named - NOT_YET_SHIPPED.keys())
    assert not missing, f"no test names these vectors: {missing}"
    shipped = sorted(named & NOT_YET_SHIPPED.keys())
    assert not shipped, f"now tested; take them off NOT_YET_SHIPPED: {shipped}"
