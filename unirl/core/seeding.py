"""Seeds derived from what they are for, so that no two generators of a run share one and a resumed
run finds the same again.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that is a function of all parts: derive_seed(run_seed, "actor", 3)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
