"""The base of every section of a spec."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen, and refusing what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
