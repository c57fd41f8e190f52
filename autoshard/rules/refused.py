"""Refused: primitives that have no sharding rule on purpose, each with its reason."""

from autoshard.rules.rule import refuse

COLLECTIVE = "a collective belongs to a `shard_map` body, whose layouts its author has fixed"
TOKEN = "a token orders side effects and holds no data"
REFERENCE = "a mutable reference has no single value to lay out"

refuse(
    {
        "after_all": TOKEN,
        "all_gather": COLLECTIVE,
        "all_to_all": COLLECTIVE,
        "axis_index": COLLECTIVE,
        "create_token": TOKEN,
        "get": REFERENCE,
        "pmax": COLLECTIVE,
        "pmin": COLLECTIVE,
        "ppermute": COLLECTIVE,
        "psum": COLLECTIVE,
        "ragged_all_to_all": COLLECTIVE,
        "swap": REFERENCE,
    }
)
